"""Coding agents as users run them without a screen: their commands, settings and variables, for a server at a URL."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "troupe"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How an agent is run. Its home holds nothing but `files`, and its environment nothing but `variables`."""

    binary: str
    arguments: tuple[str, ...]
    """Of the command, before the question."""
    variables: Callable[[str], Mapping[str, str]]
    """Of a server's URL."""
    files: Callable[[str], Mapping[str, str]] = field(default=lambda url: {})
    """Texts by path in the home, of a server's URL."""
    context: int
    """Tokens that the server allows."""
    overflows: bool = True
    """The session is longer than that, and goes on with a summary."""
    exit_code: int = 0
    """Of a session that has overflowed and gone on."""

    def prepare(self, home: Path, url: str, programs: str) -> dict[str, str]:
        """Write the settings; gives the variables.

        Args:
            programs: folders in which programs are found, beside the agent's own.
        """
        home.mkdir()
        for path, text in self.files(url).items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        variables = {name: value.replace("HOME", str(home)) for name, value in self.variables(url).items()}
        return variables | {"HOME": str(home), "PATH": programs}

    def binaries(self, folder: Path) -> Path:
        """Where the programs lie of an agent that npm or an environment of Python has in a folder."""
        return next(folder.glob("node_modules/.bin"), folder / "bin")

    def arguments_in(self, home: Path) -> list[str]:
        """Those of the command, before the question."""
        return [argument.replace("HOME", str(home)) for argument in self.arguments]


def _claude(url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }


def _codex(url: str) -> dict[str, str]:
    text = f"""
model = "{MODEL}"
model_provider = "{MODEL}"
model_context_window = 24000
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.{MODEL}]
name = "{MODEL}"
base_url = "{url}/v1"
wire_api = "responses"
"""
    return {".codex/config.toml": text}


def _opencode(url: str) -> dict[str, str]:
    model = {"reasoning": True, "tool_call": True, "limit": {"context": 131_072, "output": 8_192}}
    provider: dict[str, Any] = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"{MODEL}/{MODEL}",
        "small_model": f"{MODEL}/{MODEL}",
        "provider": {MODEL: provider},
    }
    return {"opencode.json": json.dumps(settings)}


def _pi(url: str) -> dict[str, str]:
    model = {"id": MODEL, "reasoning": True, "input": ["text", "image"], "contextWindow": 131_072, "maxTokens": 8_192}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    settings = {"compaction": {"keepRecentTokens": 4_000}}
    return {
        ".pi/agent/models.json": json.dumps({"providers": {MODEL: provider}}),
        ".pi/agent/settings.json": json.dumps(settings),
    }


def _qwen_code(url: str) -> dict[str, str]:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def _cn(url: str) -> dict[str, str]:
    model = {
        "name": MODEL,
        "model": MODEL,
        "provider": "openai",
        "apiBase": f"{url}/v1",
        "apiKey": "none",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    return {"config.yaml": json.dumps({"name": MODEL, "version": "1.0.0", "schema": "v1", "models": [model]})}


def _cline(url: str) -> dict[str, str]:
    settings = {"provider": "openai-compatible", "model": MODEL, "apiKey": "none", "baseUrl": f"{url}/v1"}
    entry = {"settings": settings, "tokenSource": "manual", "updatedAt": "2026-01-01T00:00:00.000Z"}
    known = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": entry}}
    return {".cline/data/settings/providers.json": json.dumps(known)}


def _llm(url: str) -> dict[str, str]:
    model = {
        "model_id": MODEL,
        "model_name": MODEL,
        "api_base": f"{url}/v1",
        "supports_tools": True,
        "can_stream": True,
    }
    return {"llm/extra-openai-models.yaml": json.dumps([model]), "tools.py": LLM_TOOLS}


def _vibe(url: str) -> dict[str, str]:
    text = f"""
active_model = "{MODEL}"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
[[providers]]
name = "{MODEL}"
api_base = "{url}/v1"
[[models]]
name = "{MODEL}"
provider = "{MODEL}"
alias = "{MODEL}"
max_context_length = 131072
max_output_tokens = 8192
"""
    return {".vibe/config.toml": text}


def _kimi(url: str) -> dict[str, str]:
    return {
        "KIMI_MODEL_NAME": MODEL,
        "KIMI_MODEL_PROVIDER_TYPE": "openai",
        "KIMI_MODEL_BASE_URL": f"{url}/v1",
        "KIMI_MODEL_API_KEY": "none",
        "KIMI_MODEL_MAX_CONTEXT_SIZE": "131072",
        "KIMI_MODEL_MAX_OUTPUT_SIZE": "8192",
        "KIMI_CODE_NO_AUTO_UPDATE": "1",
        "KIMI_DISABLE_TELEMETRY": "1",
    }


LLM_TOOLS = '''
from pathlib import Path


def write(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


def read(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()
'''
"""The functions that `llm` offers."""

AGENTS: Mapping[str, Agent] = {
    "claude-code": Agent(
        binary="claude", arguments=("--allowedTools=Read,Write", "-p"), variables=_claude, context=30_000
    ),
    "codex": Agent(
        binary="codex",
        arguments=("exec", "--skip-git-repo-check"),
        variables=lambda url: {},
        files=_codex,
        context=24_000,
    ),
    "opencode": Agent(
        binary="opencode",
        arguments=("run",),
        variables=lambda url: {
            "OPENCODE_CONFIG": "HOME/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files=_opencode,
        context=32_000,
        exit_code=1,
    ),
    "qwen-code": Agent(
        binary="qwen",
        arguments=("-y", "-p"),
        variables=lambda url: {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL},
        files=_qwen_code,
        context=131_072,
        overflows=False,
    ),
    "cn": Agent(
        binary="cn",
        arguments=("--config=HOME/config.yaml", "--auto", "-p"),
        variables=lambda url: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        files=_cn,
        context=131_072,
        overflows=False,
    ),
    "pi": Agent(
        binary="pi",
        arguments=("--provider", MODEL, "--model", MODEL, "-p"),
        variables=lambda url: {"PI_OFFLINE": "1"},
        files=_pi,
        context=24_000,
    ),
    "cline": Agent(
        binary="cline",
        arguments=("--auto-approve", "true", "--json"),
        variables=lambda url: {"CLINE_NO_AUTO_UPDATE": "1", "CLINE_SESSION_BACKEND_MODE": "local"},
        files=_cline,
        context=131_072,
        overflows=False,
    ),
    "llm": Agent(
        binary="llm",
        arguments=("-m", MODEL, "--functions", "HOME/tools.py", "--chain-limit", "0"),
        variables=lambda url: {"LLM_USER_PATH": "HOME/llm", "OPENAI_API_KEY": "none"},
        files=_llm,
        context=131_072,
        overflows=False,
    ),
    "vibe": Agent(
        binary="vibe",
        arguments=("--auto-approve", "--trust", "-p"),
        variables=lambda url: {},
        files=_vibe,
        context=131_072,
        overflows=False,
    ),
    "kimi": Agent(
        binary="kimi",
        arguments=("-p",),
        variables=_kimi,
        context=131_072,
        overflows=False,
    ),
}
