"""Flags of the benchmarks of kernels and of single steps."""

import argparse

from troupellm.load_tests.flags.values import count, finite, natural, not_negative

OPERATIONS = (
    "linear", "linear_int8", "rms_norm", "add_rms_norm", "rope", "silu_mul", "gelu_mul", "kv_write", "decode_attention",
    "prefill_attention", "sampling", "fused_moe", "linear_fp8", "rope_kv_write", "row_codes", "grouped_linear",
    "truncated_sampling", "penalties", "chosen_logprobs", "step_begin", "step_end", "linear_invariant",
    "verify_attention", "coded_cache_attention", "latent_attention", "linear_coded", "coded_experts", "guide_masks",
)  # fmt: skip
MODELS = ("24m", "125m", "qwen3-0.6b", "qwen3-8b", "llama-8b", "qwen3-30b-a3b")
STEP_MODELS = ("24m", "125m", "qwen3-0.6b", "tiny")
STEP_LEVELS = ("worker", "engine", "http")
OVERLAP_SEATS = ("thread", "process")
LORA_PARTS = ("steps", "gaps", "memory")


def kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--model", choices=MODELS, help="whose shapes (default: 125m on a CPU, else qwen3-8b)")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32], help="rows of a step")
    parser.add_argument("--context", type=count, default=1024, help="keys of each row, and tokens of a prompt")
    parser.add_argument("--seconds", type=finite, default=0.3, help="for each shape")
    parser.add_argument("--num-threads", type=count, help="on a CPU (default: all cores)")
    parser.add_argument("--check-only", action="store_true", help="correctness alone")
    parser.add_argument("--result-json", metavar="FILE", help="written after every operation")


def step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="24m", help=f"random: {', '.join(STEP_MODELS)}; or a checkpoint's folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--quantization", help="as of `serve`, such as int8")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32, 64, 256], help="sequences that decode")
    parser.add_argument("--context", type=count, default=128, help="tokens of each when the clock starts")
    parser.add_argument("--steps", type=count, default=32, help="decoding steps whose median counts")
    parser.add_argument("--levels", nargs="+", choices=STEP_LEVELS, default=list(STEP_LEVELS))
    parser.add_argument("--num-threads", type=count, help="on a CPU (default: all cores)")
    parser.add_argument("--seconds", type=finite, default=0.3, help="for each ceiling")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: of a folder's config")
    parser.add_argument(
        "--beside",
        nargs="+",
        type=natural,
        metavar="N",
        help="instead: all threads against one, decoding and prompts, beside N busy programs each (0 is quiet)",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="with --beside: as of `serve`")
    parser.add_argument("--repeats", type=count, default=3, help="with --beside: turns, whose median counts")
    parser.add_argument("--result-json", metavar="FILE", help="written after every batch size")


def lora(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("tiny", "24m", "125m"), default="125m", help="random weights of that shape")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32], help="rows that decode")
    parser.add_argument("--adapters", type=count, default=8, help="adapters that rows have in turns")
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--context", type=count, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=count, default=24, help="of each measurement; their median counts")
    parser.add_argument("--rounds", type=count, default=5, help="in each of which all sides are measured once")
    parser.add_argument("--streams", type=count, default=8, help="that run while adapters are loaded")
    parser.add_argument("--loads", type=count, default=100, help="beside the streams, in all rounds together")
    parser.add_argument("--memory-loads", type=count, default=1000, help="before memory is looked at")
    parser.add_argument("--num-threads", type=count, help="(default: all cores)")
    parser.add_argument("--parts", nargs="+", choices=LORA_PARTS, default=list(LORA_PARTS))
    parser.add_argument("--result-json", metavar="FILE")


def overlap(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seats", nargs="+", choices=OVERLAP_SEATS, default=list(OVERLAP_SEATS), help="where the worker lives"
    )
    parser.add_argument("--running", nargs="+", type=count, default=[32, 256], help="sequences that decode")
    parser.add_argument(
        "--device-ms", nargs="+", type=finite, default=[0.7, 5.0, 15.0], help="what the device takes for a step"
    )
    parser.add_argument("--launch-us", type=not_negative, default=250.0, help="what a launch takes of the processor")
    parser.add_argument("--window-steps", type=count, default=60, help="steps that make one window")
    parser.add_argument("--windows", type=count, default=5, help="windows whose median counts")
    parser.add_argument("--flush-ms", type=not_negative, default=20.0, help="flush interval of streams")
    parser.add_argument("--time-limit-sec", type=finite, default=120.0, help="of one measurement")
    parser.add_argument("--result-json", metavar="FILE")
