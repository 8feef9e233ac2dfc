"""BERT's tokenizer on the `tokenizers` library, with the names and the results of transformers' BertTokenizer.

A text is cleaned, lower-cased or not, split at spaces, punctuation and Chinese characters, and each word is cut into
the longest pieces that the vocabulary has; pieces inside a word begin with ##.  A tokenizer.json with other parts,
such as Unigram or BPE, is used unchanged.  The Rust tokenizer keeps no padding or truncation between calls: of those
in a tokenizer.json, only the sides have an effect.

Letters:  B sequences · S positions, padding included
"""

import inspect
import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bertlite.checkpoint.files import Source
from bertlite.checkpoint.hub import push_folder
from bertlite.tokenizer.encoding import (
    PADDING,
    SIDES,
    TRUNCATION,
    BatchEncoding,
    Text,
    explained_errors,
    look_up,
    make_batch,
    read_texts,
)
from bertlite.tokenizer.files import (
    ARGUMENTS,
    BERT_CLASSES,
    BERT_SETTINGS,
    EXTRA,
    FLAGS,
    LOCAL,
    NO_LIMIT,
    SETTINGS,
    errors_with_path,
    extra_tokens,
    find_tokenizer,
    number_tokens,
    read_arguments,
    write_files,
)
from bertlite.tokenizer.vocabulary import Vocabulary, make_backend, missing_token

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


class BertTokenizer(Vocabulary):
    """Texts to token ids and back, as transformers' BertTokenizer.

    Its vocabulary and settings are chosen when it is made; only `add_tokens` changes them.  It can be pickled and
    shared by threads.

    Args:
        vocab: {token: id}, the tokens in the order of their ids, or a vocab.txt.
        do_lower_case: lower-case the text.
        strip_accents: remove accents; None follows `do_lower_case`.
        tokenize_chinese_chars: make each Chinese character a word.
        clean_text: remove control characters.
        unk_token, sep_token, pad_token, cls_token, mask_token: the special tokens; each has an id.
        bos_token, eos_token: special tokens that BERT does not use.
        never_split: words of the vocabulary that are never cut nor lower-cased.
        added_tokens: {id: {"content": "<e>", "special": true, …}}, tokens that are never cut, as
            `added_tokens_decoder` in tokenizer_config.json.
        model_max_length: in tokens, the length that `truncation=True` truncates to.
        padding_side, truncation_side: "right" or "left".
        clean_up_tokenization_spaces: let `decode` join "do n't" and " ." too.
        max_input_chars_per_word: a longer word becomes unk_token.

    Raises:
        ValueError: a special token is not in the vocabulary, or a setting has an unknown value.
    """

    model_input_names: ClassVar[list[str]] = ["input_ids", "token_type_ids", "attention_mask"]
    is_fast = True
    pad_token_type_id = 0
    do_lower_case: bool | None = None  # these three are BERT's own
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    _stated: Mapping[str, Any] = MappingProxyType({})  # by the tokenizer_config.json that it was read from

    def __init__(
        self,
        vocab: Mapping[str, int] | Sequence[str] | PathLike[str],
        *,
        do_lower_case: bool = True,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        clean_text: bool = True,
        unk_token: str = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str = "[MASK]",
        bos_token: str | None = None,
        eos_token: str | None = None,
        never_split: Sequence[str] | None = None,
        added_tokens: Mapping[int, Mapping[str, Any]] | None = None,
        model_max_length: int = NO_LIMIT,
        padding_side: str = "right",
        truncation_side: str = "right",
        clean_up_tokenization_spaces: bool = False,
        max_input_chars_per_word: int = 100,
    ) -> None:
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.processors import TemplateProcessing

        words = vocab if isinstance(vocab, Mapping) else number_tokens(vocab)
        added = added_tokens or {}
        uncut = {unk_token, sep_token, pad_token, cls_token, mask_token, *(each["content"] for each in added.values())}
        kept = [word for word in never_split or () if word not in uncut]
        for role, token in (("unk_token", unk_token), *(("never_split", word) for word in kept)):
            if token not in words:
                raise missing_token(role, token, len(words))
        normalizer = BertNormalizer(clean_text, tokenize_chinese_chars, strip_accents, do_lower_case)
        whole = {words[word]: {"content": word, "normalized": False, "single_word": True} for word in kept}
        super().__init__(
            make_backend(words, unk_token, max_input_chars_per_word, normalizer),
            added_tokens={**whole, **added},
            model_max_length=model_max_length,
            padding_side=padding_side,
            truncation_side=truncation_side,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=mask_token,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        self._tokenizer.post_processor = TemplateProcessing(
            single=f"{cls_token}:0 $A:0 {sep_token}:0",
            pair=f"{cls_token}:0 $A:0 {sep_token}:0 $B:1 {sep_token}:1",
            special_tokens=[(cls_token, self.cls_token_id), (sep_token, self.sep_token_id)],
        )
        self.do_lower_case, self.strip_accents = do_lower_case, strip_accents
        self.tokenize_chinese_chars = tokenize_chinese_chars

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **settings: Any,
    ) -> Self:
        """Load the tokenizer of a checkpoint.

        tokenizer_config.json overrides tokenizer.json, as in transformers; where neither states `do_lower_case`, it is
        True.  Where neither limits the length, the positions of the model beside them do.

        Args:
            source: a hub id, a folder, or a vocab.txt or tokenizer.json, whose settings are read beside it.
            revision, subfolder, cache_dir, token, local_files_only: as for `huggingface_hub`.
            settings: arguments of the constructor that replace the files'.

        Raises:
            FileNotFoundError: there is no such checkpoint, or it has neither tokenizer.json nor vocab.txt.
            ValueError: a damaged file; a tokenizer that works in Python; or a setting of BERT's parts for other parts.
            TypeError: a setting that the constructor does not take.
        """
        place, found = find_tokenizer(Source(source, revision, subfolder, None, cache_dir, token, local_files_only))
        inspect.signature(cls).bind_partial(**settings)  # raises TypeError for an unknown one
        with errors_with_path(found):
            arguments, config, backend = read_arguments(place, found)
            if backend is None:
                tokenizer = cls(**{**arguments, **settings})
            else:
                fixed = ", ".join(sorted(settings.keys() - {*ARGUMENTS}))
                if fixed:
                    raise ValueError(f"{fixed} cannot be set: the parts are not BERT's; change them in the file")
                backend.encode_special_tokens = bool(config.get("split_special_tokens"))
                backend.no_truncation()
                backend.no_padding()
                tokenizer = cls.__new__(cls)
                Vocabulary.__init__(tokenizer, backend, **{**arguments, **settings})
            vars(tokenizer).update(
                _stated={name: value for name, value in config.items() if name not in (*EXTRA, *LOCAL, "max_len")},
                model_input_names=config.get("model_input_names", cls.model_input_names),
            )
            lacking = [token for token in extra_tokens(config) if token not in tokenizer.all_special_tokens]
            if lacking:
                tokenizer.add_tokens(lacking, special_tokens=True)
        return tokenizer

    # Texts to ids ----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        text: Text | Sequence[Text] | Sequence[tuple[Text, Text]],
        text_pair: Text | Sequence[Text] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str | None = False,
        truncation: bool | str | None = False,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
    ) -> BatchEncoding:
        """Encode one text, a list of them, or pairs.

        Args:
            text: a string, or a list of strings or of pairs; if `is_split_into_words`, one list of words, or several.
            text_pair: the second text, after the first [SEP], or a list with one for each text.  An empty one is left
                out for one text, and has its [SEP] in a batch, as in transformers.
            padding: True or "longest", to the longest of these texts; "max_length"; or False.
            truncation: True or "longest_first", which shortens the longer one of a pair; "only_first"; "only_second";
                or False.
            max_length: in tokens, special ones included; by default `model_max_length`.
            stride: the number of tokens that each overflowing piece repeats of the one before.
            return_tensors: "pt", "np" or None, for lists.
            return_token_type_ids, return_attention_mask: by default, if in `model_input_names`.
            return_overflowing_tokens: return the tokens that truncation cuts off as further sequences;
                `overflow_to_sample_mapping` has the index of the text that each sequence comes from.
            return_offsets_mapping: add the start and end of each token in its text, in characters.
            return_special_tokens_mask: add 1 for every special token and padding, 0 for others.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` and the columns asked for: (B, S) as tensors, else lists;
            flat lists for one text without `return_tensors` or overflow.

        Raises:
            ValueError: a text that is not a string or holds a lone surrogate; a strategy that is not one of those
                above; a max_length that is missing, too short or without effect; rows of unequal length for tensors.
        """
        texts, batched = read_texts(text, text_pair, is_split_into_words)
        strategy = look_up("truncation", truncation, TRUNCATION)
        target = self._padding(padding)
        paired = len(texts) > 0 and isinstance(texts[0], tuple)
        framing = self.num_special_tokens_to_add(paired) if add_special_tokens else 0
        limit = self._limit(strategy, target, max_length, stride, framing)
        if strategy and target and limit % (pad_to_multiple_of or 1):
            raise ValueError(f"max_length={limit} is not a multiple of pad_to_multiple_of={pad_to_multiple_of}")
        side = padding_side or self.padding_side
        with self._lock:  # the Rust tokenizer cannot be changed while another thread uses it
            try:
                with explained_errors(texts, f"truncation={truncation!r}, max_length={limit}, stride={stride}"):
                    if strategy:
                        self._truncate_at(limit, stride, strategy, add_special_tokens)
                    if target:
                        self._pad_to(limit if target == "max_length" else None, side, pad_to_multiple_of)
                    encodings = self._tokenizer.encode_batch(
                        texts, is_pretokenized=is_split_into_words, add_special_tokens=add_special_tokens
                    )
            finally:
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()
        asked = {
            "token_type_ids": return_token_type_ids,
            "attention_mask": return_attention_mask,
            "special_tokens_mask": return_special_tokens_mask,
            "offset_mapping": return_offsets_mapping,
            "length": return_length,
        }
        inputs = self.model_input_names
        names = ["input_ids", *(n for n, wanted in asked.items() if (n in inputs if wanted is None else wanted))]
        return make_batch(encodings, names, return_tensors, batched=batched, overflowing=return_overflowing_tokens)

    def _truncate_at(self, limit: int, stride: int, strategy: str, framed: bool) -> None:
        from tokenizers.processors import TemplateProcessing

        backend, frame = self._tokenizer, self._tokenizer.post_processor
        try:
            if frame is not None and not framed:  # else special tokens would be counted, though none are added
                backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
            backend.enable_truncation(limit, stride=stride, strategy=strategy, direction=self.truncation_side)
        finally:
            if frame is not None:
                backend.post_processor = frame

    def _pad_to(self, length: int | None, side: str, multiple: int | None) -> None:
        look_up("padding_side", side, SIDES)
        self._tokenizer.enable_padding(
            length=length,
            direction=side,
            pad_id=self.pad_token_id,
            pad_token=self.pad_token,
            pad_type_id=self.pad_token_type_id,
            pad_to_multiple_of=multiple,
        )

    def _padding(self, padding: bool | str | None) -> str | None:
        target = look_up("padding", padding, PADDING)
        if target and self.pad_token is None:
            raise ValueError("this tokenizer has no padding token: pass pad_token= when loading it")
        return target

    def _limit(
        self, strategy: str | None, target: str | None, max_length: int | None, stride: int, framing: int
    ) -> int:
        """Return the length that sequences, `framing` special tokens included, get; 0 for no limit."""
        if not strategy and target != "max_length":
            if max_length is not None:
                raise ValueError(
                    f"max_length={max_length} has no effect without truncation=True or padding='max_length'"
                )
            return 0
        limit = self.model_max_length if max_length is None else max_length
        if limit >= NO_LIMIT:
            raise ValueError("this tokenizer has no model_max_length to truncate or pad to: pass max_length=")
        room = limit - framing
        if strategy and room < 1:
            raise ValueError(f"max_length={limit} has no room for a token beside the {framing} special ones")
        if strategy and not 0 <= stride < room:
            raise ValueError(f"stride={stride} does not fit max_length={limit}; it may be 0 to {room - 1}")
        return limit

    def encode(self, text: Text, text_pair: Text | None = None, **options: Any) -> Any:
        """Return the `input_ids` of one text, a list or as `return_tensors` says; options are those of `__call__`."""
        return self(text, text_pair, **options)["input_ids"]

    def tokenize(self, text: str, pair: str | None = None, *, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text, and of its pair."""
        return self(text, pair, add_special_tokens=add_special_tokens).tokens()

    # Files -----------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | PathLike[str]) -> tuple[str, ...]:
        """Write tokenizer.json, tokenizer_config.json and vocab.txt, which bertlite and transformers load.

        The folder is replaced in one step: a crash leaves the old one or the new one.  Other files in it are kept.

        Returns:
            The paths of the files.  A vocabulary whose ids have gaps has no vocab.txt.
        """
        return write_files(Path(folder).expanduser(), self._tokenizer, self._config())

    def push_to_hub(self, repo_id: str, *, commit_message: str = "Upload tokenizer", **options: Any) -> "CommitInfo":
        """Upload what `save_pretrained` writes to a repository of the hub.

        Args:
            options: `private`, `token`, `revision` and `create_pr`, as of `BertModel.push_to_hub`.
        """
        return push_folder(self.save_pretrained, repo_id, commit_message=commit_message, **options)

    def _config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        more = [token for token in self.all_special_tokens if token not in self.special_tokens_map.values()]
        own, kind = self.do_lower_case is not None, self._stated.get("tokenizer_class") or "BertTokenizer"
        is_bert = kind.removesuffix("Fast") in BERT_CLASSES
        return {
            **self._stated,
            "added_tokens_decoder": {
                str(number): {"content": token.content, **{flag: getattr(token, flag) for flag in FLAGS}}
                for number, token in self.added_tokens_decoder.items()
            },
            **{name: getattr(self, name) for name in (*BERT_SETTINGS, *SETTINGS) if own or name in SETTINGS},
            **self.special_tokens_map,
            **({"additional_special_tokens": more} if more else {}),
            "model_max_length": self.model_max_length,
            "tokenizer_class": "BertTokenizer" if own else "PreTrainedTokenizerFast" if is_bert else kind,
        }

    def __repr__(self) -> str:
        return f"BertTokenizer({len(self)} tokens, do_lower_case={self.do_lower_case})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())
