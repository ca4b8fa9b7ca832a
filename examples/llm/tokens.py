"""Text to token ids and back, as the model file describes it."""

from __future__ import annotations

from collections.abc import Callable

import jinja2
from model_file import open_model_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # GGUF's mark of a token that never comes from text


class ChatTokenizer:
    """The byte-level BPE of the model file, and its chat template."""

    def __init__(self) -> None:
        settings = open_model_file().settings
        tokens: list[str] = settings["tokenizer.ggml.tokens"]
        kinds: list[int] = settings["tokenizer.ggml.token_type"]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]
        bpe = Tokenizer(models.BPE(vocabulary, merges))
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        bpe.decoder = decoders.ByteLevel()
        kind_of = zip(tokens, kinds, strict=True)
        bpe.add_special_tokens([token for token, kind in kind_of if kind == CONTROL])
        self._bpe = bpe
        self._template = jinja2.Template(settings["tokenizer.chat_template"])
        self.end: int = settings["tokenizer.ggml.eos_token_id"]

    def prompt(self, text: str) -> list[int]:
        """The text as one user message, in the form the model was trained on."""
        message = {"role": "user", "content": text}
        chat = self._template.render(messages=[message], add_generation_prompt=True)
        return list(self._bpe.encode(chat).ids)

    def text_stream(self) -> Callable[[int], str]:
        """Token by token, the text that is complete by now: a character may need several tokens."""
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._bpe, token) or ""
