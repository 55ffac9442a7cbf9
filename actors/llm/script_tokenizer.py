"""The model's tokenizer and chat template with the names that scripts for vLLM and transformers call."""

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

from troupellm.actors.engine.engine import Engine
from troupellm.actors.input.tokenize import tokenize
from troupellm.models.chat_template.template import ChatTemplate, check_template_kwargs
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import TextPrompt, Truncation

Message = Mapping[str, Any]


class TokenizedTexts(UserDict[str, Any]):
    """`input_ids` and `attention_mask` as items and as attributes: a list for one text, a list of lists for many."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """Ones: no text is padded."""
        return self["attention_mask"]


class ScriptTokenizer:
    """The answer of `get_tokenizer`. Thread-safe.

    Defaults are those of transformers: `encode` adds special tokens and `decode` shows them. Token ids are lists of
    integers; tensors and padding are left to the caller.

    Attributes:
        vocab_size: tokens without those that were added to the vocabulary; `len` counts all.
        model_max_length: tokens of the longest sequence that the engine takes.
        chat_template: the template's text, None without one; another one may be assigned.
        bos_token, eos_token, unk_token, pad_token: texts of special tokens, and as `..._id` their ids; None where the
            model names none. Others may be assigned.
    """

    is_fast = True
    truncation_side = "right"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocabulary = tokenizer.vocabulary()
        self._texts = {token_id: text for text, token_id in self._vocabulary.items()}
        self.vocab_size = tokenizer.base_size
        self.model_max_length = max_model_len
        self.chat_template = template.sources.get("default")
        self.bos_token = self._special("bos_token", tokenizer.bos_token_id)
        self.eos_token = self._special("eos_token", min(tokenizer.eos_token_ids, default=None))
        self.unk_token = self._special("unk_token", None)
        self.pad_token = self._special("pad_token", None)

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Of an engine that is open."""
        return cls(engine.tokenizer, engine.chat_template, engine.limits.max_model_len)

    def __len__(self) -> int:
        return len(self._vocabulary)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of(self.unk_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of(self.pad_token)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._texts[token_id] for token_id in self.all_special_ids]

    def get_vocab(self) -> dict[str, int]:
        """Every token's id by its form in the vocabulary."""
        return dict(self._vocabulary)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.added_tokens)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        truncation: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """The token ids of a text.

        Args:
            truncation: cut the end off to `max_length` tokens; True without it means `model_max_length`, and None cuts
                if `max_length` is given.

        Raises:
            InvalidRequest: no text, half of a surrogate pair, or a length below 1.
        """
        cut = None
        if truncation or (truncation is None and max_length is not None):
            keep = self.model_max_length if max_length is None else max_length
            if keep < 1:
                raise InvalidRequest(f"max_length must be at least 1, got {keep}", param="max_length")
            cut = Truncation(keep, "right")
        prompt = TextPrompt(text, add_special_tokens, cut)
        return list(tokenize(prompt, self._tokenizer, self._template, None).token_ids)

    def __call__(self, text: str | Sequence[str], **options: Any) -> TokenizedTexts:
        """The token ids of one text or of many; options are those of `encode`."""
        if isinstance(text, str):
            ids = self.encode(text, **options)
            return TokenizedTexts({"input_ids": ids, "attention_mask": [1] * len(ids)})
        many = [self.encode(each, **options) for each in text]
        return TokenizedTexts({"input_ids": many, "attention_mask": [[1] * len(ids) for ids in many]})

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; ids beyond the vocabulary are left out."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(each, skip_special_tokens) for each in sequences]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Ids of tokens as the vocabulary spells them; an unknown one has `unk_token_id`."""
        if isinstance(tokens, str):
            return self._vocabulary.get(tokens, self.unk_token_id)
        return [self._vocabulary.get(token, self.unk_token_id) for token in tokens]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Tokens as the vocabulary spells them; an id beyond it is an empty one."""
        if isinstance(ids, int):
            return self._texts.get(ids, "")
        return [self._texts.get(token_id, "") for token_id in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Message] | None = None,
        *,
        documents: Sequence[Message] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """The prompt of one conversation, or a list of those of many.

        Args:
            tools: JSON descriptions; functions are not described for their caller.
            chat_template: text of a template to use instead of the attribute of this name.
            tokenize: give lists of token ids, else texts.
            return_dict: give token ids as `TokenizedTexts`.
            variables: of the template.

        Raises:
            InvalidRequest: no template, or messages, tools or variables that it refuses.
        """
        if not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise InvalidRequest("tools must be JSON descriptions of functions, each a mapping", param="tools")
        single = not conversation or isinstance(conversation[0], Mapping)
        many: Sequence[Any] = [conversation] if single else conversation
        if chat_template is None and self.chat_template != self._template.sources.get("default"):
            chat_template = self.chat_template
        check_template_kwargs(variables)  # before one of them can collide with an argument below
        texts = [
            self._template.patient.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                documents=documents,
                source=chat_template,
                **variables,
            )
            for messages in many
        ]
        found = texts[0] if single else texts
        if not tokenize:
            return found
        tokenized = self(found, add_special_tokens=False)
        return tokenized if return_dict else tokenized.input_ids

    def _special(self, name: str, token_id: int | None) -> str | None:
        """The text of a special token, by its name or else by its id."""
        text = self._template.special_tokens.get(name)
        if text in self._vocabulary:
            return text
        return None if token_id is None else self._texts.get(token_id)

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._vocabulary.get(text)
