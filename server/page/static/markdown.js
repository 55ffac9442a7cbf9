// Markdown as nodes. A model's text only ever becomes text nodes and a few elements without attributes of its own;
// addresses of links are checked, and nothing is loaded from them.
const MOST = 200_000;
const SAFE = /^(https?:\/\/|mailto:)[^\s]+$/i;
const INLINE = /(`{1,3})([^`\n]{1,2000})\1|\*\*([^*\n]{1,2000})\*\*|\*([^*\s][^*\n]{0,2000})\*|\[([^[\]\n]{1,500})\]\(([^)\s]{1,2000})\)/g;

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function render(text) {
  const made = document.createDocumentFragment();
  if (text.length > MOST) { made.append(element("p", text)); return made; }
  const lines = text.split("\n");
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = /^\s{0,3}(`{3,}|~{3,})\s*([\w+-]{0,30})/.exec(line);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trimStart().startsWith(fence[1])) end++;
      made.append(codeBlock(lines.slice(at + 1, end).join("\n")));
      at = end + 1;
    } else if (/^#{1,6}\s/.test(line)) {
      const heading = element("p"), strong = element("strong");
      strong.append(inline(line.replace(/^#+\s+/, "")));
      heading.append(strong);
      made.append(heading);
      at++;
    } else if (/^\s{0,3}([-*+]|\d{1,9}[.)])\s+/.test(line)) {
      const list = element(/^\s*\d/.test(line) ? "ol" : "ul");
      for (; at < lines.length && /^\s{0,8}([-*+]|\d{1,9}[.)])\s+/.test(lines[at]); at++) {
        const item = element("li");
        item.append(inline(lines[at].replace(/^\s*([-*+]|\d+[.)])\s+/, "")));
        list.append(item);
      }
      made.append(list);
    } else if (line.startsWith(">")) {
      const quote = element("blockquote"), said = [];
      for (; at < lines.length && lines[at].startsWith(">"); at++) said.push(lines[at].replace(/^>\s?/, ""));
      quote.append(inline(said.join("\n")));
      made.append(quote);
    } else if (!line.trim()) {
      at++;
    } else {
      const said = [];
      for (; at < lines.length && lines[at].trim() && !/^(\s{0,3}(`{3}|~{3})|#{1,6}\s|>)/.test(lines[at]); at++) said.push(lines[at]);
      if (!said.length) said.push(lines[at++]);
      const paragraph = element("p");
      paragraph.append(inline(said.join("\n")));
      made.append(paragraph);
    }
  }
  return made;
}

function inline(text) {
  const made = document.createDocumentFragment();
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    made.append(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[2] !== undefined) made.append(element("code", match[2]));
    else if (match[3] !== undefined) made.append(element("strong", match[3]));
    else if (match[4] !== undefined) made.append(element("em", match[4]));
    else made.append(link(match[5], match[6], match[0]));
  }
  made.append(text.slice(from));
  return made;
}

function link(label, address, whole) {
  if (!SAFE.test(address)) return document.createTextNode(whole);
  const made = element("a", label);
  made.href = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  made.title = address;
  return made;
}

function codeBlock(code) {
  const made = element("div", undefined, "code"), pre = element("pre"), copy = element("button", "Copy");
  pre.append(element("code", code));
  pre.tabIndex = 0;
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(code).then(() => { copy.textContent = "Copied"; }, () => {}));
  made.append(pre, copy);
  return made;
}
