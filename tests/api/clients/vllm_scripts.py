"""Scripts as users of vLLM write them, with the name of the package changed; the last line has results as JSON."""

import asyncio
import json
import sys
from typing import Any

from troupellm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)

PROMPTS = ["Hello, my name is", "The capital of France is", "Once upon a time"]


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser()
    EngineArgs.add_cli_args(made)
    made.set_defaults(enforce_eager=True, tensor_parallel_size=1, seed=0)
    group = made.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    return made


def basic(args: dict[str, Any]) -> Any:
    """Generate and chat with the defaults of the model, changed by flags."""
    sampled = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in sampled.items():
        if value is not None:
            setattr(params, name, value)
    outputs = llm.generate(PROMPTS, params)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Tell me a story about a fox."},
    ]
    chats = llm.chat([conversation for _ in range(2)], params, use_tqdm=False)
    return {
        "prompts": [output.prompt for output in outputs],
        "tokens": [len(output.outputs[0].token_ids) for output in outputs],
        "reasons": [output.outputs[0].finish_reason for output in outputs],
        "same": chats[0].outputs[0].text == chats[1].outputs[0].text,
    }


def tokenizer(args: dict[str, Any]) -> Any:
    """Prompts that the script renders and tokenizes by itself."""
    llm = LLM(model=args["model"], seed=0)
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "What is 23 + 45?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(tokenizer.eos_token)]
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=stops)
    (by_text,) = llm.generate(prompt, params, use_tqdm=False)
    (by_ids,) = llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
    (by_chat,) = llm.chat(messages, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in (by_text, by_ids, by_chat)]
    decoded = tokenizer.decode(by_ids.outputs[0].token_ids, skip_special_tokens=True)
    return {"same": len(set(texts)) == 1, "decoded": decoded.strip() == texts[0].strip(), "ids": len(ids) > 5}


def structured(args: dict[str, Any]) -> Any:
    """Choices, patterns, schemas, logprobs and beams."""
    llm = LLM(model=args["model"], max_model_len=256)
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    address = StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com")
    regex = SamplingParams(temperature=0, structured_outputs=address, max_tokens=40)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema))
    asked = llm.generate(["Is it good?", "Write an address."], [choice, regex], use_tqdm=False)
    (filled,) = llm.generate("A number:", form, use_tqdm=False)
    (seen,) = llm.generate("One two", SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    (beams,) = llm.beam_search([{"prompt": "One two"}], BeamSearchParams(beam_width=3, max_tokens=4))
    return {
        "choice": asked[0].outputs[0].text,
        "regex": asked[1].outputs[0].text,
        "schema": filled.outputs[0].text,
        "logprobs": [len(entry) for entry in seen.outputs[0].logprobs or []],
        "first": seen.prompt_logprobs is not None and seen.prompt_logprobs[0] is None,
        "beams": len(beams.sequences),
    }


def steps(args: dict[str, Any]) -> Any:
    """An engine that is driven step by step."""
    names = EngineArgs.__dataclass_fields__
    engine = LLMEngine.from_engine_args(EngineArgs(**{name: value for name, value in args.items() if name in names}))
    waiting = [(prompt, SamplingParams(max_tokens=8, n=place)) for place, prompt in enumerate(PROMPTS, 1)]
    number, finished = 0, {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = len(output.outputs)
    engine.shutdown()
    return finished


def streamed(args: dict[str, Any]) -> Any:
    """Answers that are iterated over."""

    async def run() -> Any:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=args["model"], enforce_eager=True))
        params = SamplingParams(max_tokens=12, temperature=0, output_kind=RequestOutputKind.DELTA, ignore_eos=True)
        pieces, ended = 0, False
        async for output in engine.generate(request_id="one", prompt="Once upon a time", sampling_params=params):
            pieces += sum(len(completion.token_ids) for completion in output.outputs)
            ended = output.finished
        engine.shutdown()
        return {"tokens": pieces, "ended": ended}

    return asyncio.run(run())


SCRIPTS = {script.__name__: script for script in (basic, tokenizer, structured, steps, streamed)}

if __name__ == "__main__":
    name, *argv = sys.argv[1:]
    print(json.dumps(SCRIPTS[name](vars(parser().parse_args(argv)))))
