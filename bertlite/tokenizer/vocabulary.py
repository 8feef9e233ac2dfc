"""The tokens of a tokenizer: their ids, special tokens, and decoding."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bertlite.tokenizer.encoding import SIDES, Ids, clean_up_spaces, look_up, to_lists
from bertlite.tokenizer.files import FLAGS, NO_LIMIT, ROLES

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.normalizers import BertNormalizer


class Vocabulary:
    """The tokens of a Rust tokenizer, by their ids and their roles.

    `pad_token`, `pad_token_id` and so on, of each of ROLES, are None if there is no such token.

    Args:
        backend: without truncation and padding.
        roles: the token of each of ROLES, or None.  The others are arguments of `BertTokenizer`.

    Raises:
        ValueError: a special token is not in the vocabulary, or an added one cannot have its id.
    """

    def __init__(
        self,
        backend: "Tokenizer",
        *,
        added_tokens: Mapping[int, Mapping[str, Any]] | None = None,
        model_max_length: int = NO_LIMIT,
        padding_side: str = "right",
        truncation_side: str = "right",
        clean_up_tokenization_spaces: bool = False,
        **roles: str | None,
    ) -> None:
        look_up("padding_side", padding_side, SIDES)
        look_up("truncation_side", truncation_side, SIDES)
        self.padding_side, self.truncation_side = padding_side, truncation_side
        self.model_max_length, self.clean_up_tokenization_spaces = model_max_length, clean_up_tokenization_spaces
        self.special_tokens_map = {role: token for role, token in roles.items() if token is not None}
        self._tokenizer, self._lock = backend, threading.Lock()
        add_tokens(backend, added_tokens or {})
        for role, token in self.special_tokens_map.items():
            number = backend.token_to_id(token)
            if number is None:
                raise missing_token(role, token, backend.get_vocab_size())
            if number not in backend.get_added_tokens_decoder():
                add_tokens(backend, {number: {"content": token, "special": True}})
        self._ids = range(max(self.get_vocab().values()) + 1)

    def __getattr__(self, name: str) -> Any:
        """Return the token of a role, or its id."""
        role = name.removesuffix("_id")
        if role not in ROLES:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        token = self.special_tokens_map.get(role)
        return token if role == name or token is None else self._tokenizer.token_to_id(token)

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary, without those added."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def vocab(self) -> dict[str, int]:
        """{token: id}, added tokens included."""
        return self.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        """Return {token: id}, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Return {token: id} of the tokens that are never cut: special ones, and those added."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_decoder(self) -> dict[int, "AddedToken"]:
        """{id: token} of the tokens that are never cut."""
        return dict(sorted(self._tokenizer.get_added_tokens_decoder().items()))

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens of `special_tokens_map`, then those added as special."""
        named = list(self.special_tokens_map.values())
        added = [token.content for token in self.added_tokens_decoder.values() if token.special]
        return list(dict.fromkeys([*named, *added]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return [self.get_added_vocab()[token] for token in self.all_special_tokens]

    @property
    def backend_tokenizer(self) -> "Tokenizer":
        """The Rust tokenizer that does the work."""
        return self._tokenizer

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return the number of special tokens in a sequence of one text, or of a pair."""
        return self._tokenizer.num_special_tokens_to_add(pair)

    def add_tokens(
        self, new_tokens: "str | AddedToken | Sequence[str | AddedToken]", special_tokens: bool = False
    ) -> int:
        """Add whole words that are never cut, as transformers does; `save_pretrained` keeps them.

        A token of the vocabulary keeps its id, others get the ids after the last one: then give the model embeddings
        for them with `model.resize_token_embeddings(len(tokenizer))`.

        Args:
            new_tokens: one or several; a `tokenizers.AddedToken` says how it is matched.
            special_tokens: `decode(skip_special_tokens=True)` leaves them out, and text is not normalised to match.

        Returns:
            How many were added; empty ones, and those added before, do not count.

        Raises:
            ValueError: a token is not a string, or the ids have gaps, which new tokens would fill.
        """
        from tokenizers import AddedToken

        tokens = [new_tokens] if isinstance(new_tokens, str | AddedToken) else list(new_tokens)
        for token in tokens:
            if not isinstance(token, str | AddedToken):
                raise ValueError(
                    f"token {token!r:.80} is a {type(token).__name__}; expected a string or an AddedToken"
                )
        with self._lock:
            if len(self) != len(self._ids):
                last = self._ids[-1]
                raise ValueError(f"the ids go to {last} for {len(self)} tokens: they have gaps, which would be filled")
            add = self._tokenizer.add_special_tokens if special_tokens else self._tokenizer.add_tokens
            added = add(tokens)
            self._ids = range(len(self))
        return added

    # Tokens to ids and back ------------------------------------------------------------------------------------------

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or a list of ids; `unk_token_id` if the vocabulary lacks it."""
        if isinstance(tokens, str):
            number = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Ids, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or a list of tokens; None for an id that is not in the vocabulary.

        Raises:
            ValueError: a number is not a token's id.
        """
        numbers = to_lists(ids)
        if isinstance(numbers, int):
            return self._tokenizer.id_to_token(self._checked([numbers])[0])
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self._tokenizer.id_to_token(number) for number in self._checked(numbers) if number not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Join tokens into a text."""
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def decode(
        self, token_ids: Ids, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """Return the text of ids, or a list of texts for a batch of them; ids are a list, an array or a tensor.

        Raises:
            ValueError: a number is not a token's id, such as the -100 of ignored labels.
        """
        numbers = to_lists(token_ids)
        if isinstance(numbers, int):
            numbers = [numbers]
        if numbers and not isinstance(numbers[0], int):
            return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in numbers]
        text = self._tokenizer.decode(self._checked(numbers), skip_special_tokens=skip_special_tokens)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return clean_up_spaces(text) if clean_up_tokenization_spaces else text

    def batch_decode(
        self,
        sequences: "Iterable[Ids]",
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in sequences]

    def _checked(self, ids: list[int]) -> list[int]:
        for number in ids:
            if number not in self._ids:
                raise ValueError(f"{number} is not a token id; this tokenizer has 0 to {self._ids[-1]}")
        return ids


# The Rust tokenizer --------------------------------------------------------------------------------------------------


def make_backend(
    vocab: Mapping[str, int], unk_token: str, max_input_chars_per_word: int, normalizer: "BertNormalizer"
) -> "Tokenizer":
    """Make a Rust tokenizer that cuts texts into pieces as BERT does, and adds no special tokens yet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = models.WordPiece(dict(vocab), unk_token=unk_token, max_input_chars_per_word=max_input_chars_per_word)
    backend = Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def add_tokens(backend: "Tokenizer", tokens: Mapping[int, Mapping[str, Any]]) -> None:
    """Add tokens that are never cut, or raise ValueError if the Rust tokenizer gives one of them another id."""
    from tokenizers import AddedToken

    for number, stated in sorted(tokens.items()):
        token, special = stated["content"], bool(stated.get("special", False))
        flags = {"normalized": not special, **{flag: stated[flag] for flag in FLAGS if flag in stated}}
        holder = backend.id_to_token(number)
        backend.add_tokens([AddedToken(token, **flags)])
        given = backend.token_to_id(token)
        if holder not in (None, token) or given != number:
            raise ValueError(
                f"added token {token!r} cannot have the id {number}: it would be {given}, and {number} is"
                f" {holder!r}; added ids follow the vocabulary's"
            )


def missing_token(role: str, token: str | None, count: int) -> ValueError:
    return ValueError(f"the vocabulary of {count} tokens has no {token!r}: pass {role}=, or add it to the vocabulary")
