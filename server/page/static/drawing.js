// The two canvases of the engine's view.
const OWNERS = 4;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function fitted(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); }
  const brush = canvas.getContext("2d");
  brush.setTransform(ratio, 0, 0, ratio, 0, 0);
  brush.clearRect(0, 0, width, height);
  return { brush, width, height };
}

export function drawBlocks(canvas, runs) {
  const { brush, width, height } = fitted(canvas);
  let total = 0;
  for (let at = 1; at < runs.length; at += 2) total += runs[at];
  if (!total) return;
  const columns = Math.max(1, Math.ceil(Math.sqrt(total * width / height))), side = width / columns;
  const tall = height / Math.ceil(total / columns), plain = ["free", "cached", "used", "shared"].map(colour);
  let place = 0;
  for (let at = 0; at < runs.length; at += 2) {
    const value = runs[at];
    brush.fillStyle = value < OWNERS ? plain[value] : `hsl(${(value - OWNERS) * 45 + 15} 65% 50%)`;
    for (let count = runs[at + 1]; count > 0; count--, place++) {
      brush.fillRect((place % columns) * side, Math.floor(place / columns) * tall, Math.max(1, side - 1), Math.max(1, tall - 1));
    }
  }
}

export function drawSteps(canvas, steps) {
  const { brush, width, height } = fitted(canvas);
  if (!steps.length) return;
  const bar = width / 100, most = Math.max(1, ...steps.map((step) => step[0] + step[1])), slowest = Math.max(0.1, ...steps.map((step) => step[3]));
  steps.forEach(([prefill, decode], at) => {
    const low = decode / most * (height - 4), high = prefill / most * (height - 4);
    brush.fillStyle = colour("decode");
    brush.fillRect(at * bar, height - low, Math.max(1, bar - 1), low);
    brush.fillStyle = colour("prefill");
    brush.fillRect(at * bar, height - low - high, Math.max(1, bar - 1), high);
  });
  brush.strokeStyle = colour("ink");
  brush.lineWidth = 1.5;
  brush.beginPath();
  steps.forEach((step, at) => brush.lineTo((at + 0.5) * bar, height - 2 - step[3] / slowest * (height - 6)));
  brush.stroke();
}
