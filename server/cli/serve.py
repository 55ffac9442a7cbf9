"""`troupellm serve [MODEL]`: the server, from flags to exit code."""

import argparse
import sys
from typing import TYPE_CHECKING

from troupellm.protocol.errors import ConfigError, ModelLoadError, TroupeError
from troupellm.server.cli.flags import add_config_flags, load_configs

if TYPE_CHECKING:
    from troupellm.actors.engine import Engine

EXIT_FAILED = 1
EXIT_MODEL = 3


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("serve", help="start the server")
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="folder or hub id; default: built-in")
    add_config_flags(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    import anyio

    from troupellm.server.run import serve

    if arguments.model_argument is not None:
        if hasattr(arguments, "config_model"):
            raise ConfigError("give the model once: as an argument or with --model", param="model")
        arguments.config_model = arguments.model_argument
    engine_config, server_config = load_configs(arguments)
    try:
        anyio.run(serve, engine_config, server_config, _announce, backend_options={"use_uvloop": _has_uvloop()})
    except ModelLoadError as error:
        print(f"troupellm: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return EXIT_MODEL
    except TroupeError as error:
        print(f"troupellm: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"troupellm: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


async def _announce(engine: "Engine", url: str) -> None:
    """Tell a newcomer what to do next, with one answer that the model gives right now."""
    chat = engine.chat_template.available
    prompt = "What is 23 + 45?" if chat else "Once upon a time"
    answer = await _answer(engine, prompt, chat=chat)
    name = engine.model_names[0]
    messages = f'[{{"role": "user", "content": "{prompt}"}}]'
    body = f'"messages": {messages}' if chat else f'"prompt": "{prompt}", "max_tokens": 64'
    path = "chat/completions" if chat else "completions"
    call = f'chat.completions.create(model="{name}", messages={messages})' if chat else (
        f'completions.create(model="{name}", prompt="{prompt}")'
    )  # fmt: skip
    print(f"\nTroupe serves {name} at {url}\n\n  {prompt}\n  {answer}\n")
    print(f"curl -N {url}/v1/{path} -H 'content-type: application/json' \\")
    print(f'  -d \'{{"model": "{name}", "stream": true, {body}}}\'\n')
    print("from openai import OpenAI")
    print(f'client = OpenAI(base_url="{url}/v1", api_key="none")')
    print(f"print(client.{call}.choices[0].{'message.content' if chat else 'text'})\n", flush=True)


async def _answer(engine: "Engine", prompt: str, *, chat: bool) -> str:
    """What the model says; a model that cannot answer is still served, so the error is what is shown."""
    try:
        messages = [{"role": "user", "content": prompt}]
        stream = engine.chat(messages, max_tokens=32, temperature=0.0) if chat else engine.stream(
            prompt, max_tokens=32, temperature=0.0
        )  # fmt: skip
        async with stream:
            return "".join([delta.text async for delta in stream]).strip()
    except TroupeError as error:
        return f"({error.message})"


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True
