"""`troupellm serve [MODEL]`: the server, from flags to exit code."""

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError, TroupeError
from troupellm.server.base.exit_codes import EXIT_FAILED, EXIT_MODEL, HELP
from troupellm.server.cli.flags import ENV_PREFIX, add_config_flags, load_configs
from troupellm.server.cli.output import give_up_output
from troupellm.server.cli.vllm_environment import API_KEY as VLLM_API_KEY

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine
    from troupellm.actors.replicas.fleet import Fleet

SECRETS = (f"{ENV_PREFIX}API_KEY", f"{ENV_PREFIX}ADMIN_API_KEY", VLLM_API_KEY)
_PATH = {True: "chat/completions", False: "completions"}
"""Route by whether the model chats."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    usage = "troupellm serve [options] [MODEL]"
    parser = subparsers.add_parser("serve", help="start the server", usage=usage, epilog=HELP, allow_abbrev=False)
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id; default: built-in"
    )
    add_config_flags(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    from troupellm.server.observe.process_life import run_loop
    from troupellm.server.serve.run import serve

    if arguments.model_argument is not None:
        if hasattr(arguments, "config_model"):
            raise ConfigError("give the model once: as an argument or with --model", param="model")
        arguments.config_model = arguments.model_argument
    elif (flag := getattr(arguments, "several_words", None)) and not _names_model(arguments):
        raise ConfigError(f"name the model before {flag}, or with --model", param=flag.lstrip("-").replace("-", "_"))
    engine_config, server_config = load_configs(arguments)
    for name in SECRETS:  # else every child process would have them in its environment
        os.environ.pop(name, None)
    announce = partial(_announce, server_config)
    try:
        return run_loop(serve, engine_config, server_config, announce)
    except ConfigError:
        raise
    except ModelLoadError as error:
        print(f"troupellm: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return EXIT_MODEL
    except TroupeError as error:
        print(f"troupellm: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        place = server_config.uds or f"{server_config.host}:{server_config.port}"
        print(f"troupellm: cannot listen at {place}: {error.strerror or error}", file=sys.stderr)
        if not server_config.uds:
            print("hint: another --port (0 takes a free one) or --host", file=sys.stderr)
        return EXIT_FAILED


def _names_model(arguments: argparse.Namespace) -> bool:
    """Whether the model may be named elsewhere than behind the flags."""
    return hasattr(arguments, "config_model") or arguments.config is not None or f"{ENV_PREFIX}MODEL" in os.environ


async def _announce(config: ServerConfig, engine: "Engine | Fleet", url: str) -> None:
    """Tell a newcomer what to do next, with one answer that the model gives right now."""
    chat = engine.chat_template.available
    prompt = "What is 23 + 45?" if chat else "Once upon a time"
    answer = await _answer(engine, prompt, chat=chat)
    name = engine.model_names[0]
    messages = f'[{{"role": "user", "content": "{prompt}"}}]'
    body = f'"messages": {messages}' if chat else f'"prompt": "{prompt}", "max_tokens": 64'
    base = f"{'http://localhost' if config.uds else url}{config.root_path}/v1"
    keys = config.api_key or config.api_key_file
    key = " -H 'authorization: Bearer <key>'" if keys else ""
    lines = [
        f"\nTroupe serves {name} at {url}\n\n  {prompt}\n  {answer}\n",
        f"curl -N{f' --unix-socket {config.uds}' if config.uds else ''} {base}/{_PATH[chat]}{key} \\",
        f'  -H \'content-type: application/json\' -d \'{{"model": "{name}", "stream": true, {body}}}\'\n',
    ]
    if not config.uds:
        argument, field = (f"messages={messages}", "message.content") if chat else (f'prompt="{prompt}"', "text")
        call = _PATH[chat].replace("/", ".")
        lines += [
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{base}", api_key="{"<key>" if keys else "none"}")',
            f'print(client.{call}.create(model="{name}", {argument}).choices[0].{field})\n',
        ]
    try:
        print("\n".join(lines), flush=True)
    except OSError:  # standard output has no reader: serving continues
        give_up_output()


async def _answer(engine: "Engine | Fleet", prompt: str, *, chat: bool) -> str:
    """The model's answer. A model that cannot answer is still served, so its error is shown instead."""
    try:
        messages = [{"role": "user", "content": prompt}]
        stream = (
            engine.chat(messages, max_tokens=32, temperature=0.0)
            if chat
            else engine.stream(prompt, max_tokens=32, temperature=0.0)
        )
        async with stream:
            return "".join([delta.text async for delta in stream]).strip()
    except TroupeError as error:
        return f"({error.message})"
