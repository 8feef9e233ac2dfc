"""The encoder of a packed file: token ids in, states out, in one call of the kernels.

Shapes:  B sequences · T tokens of all of them, one after another · D hidden · O outputs of a linear layer
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .contents import CLASSES, ROW_SCALES, has_transform, pooler_act
from .packed import PackedFile, aligned, lay_in_blocks_
from .pooling import POOLINGS
from .shapes import BYTES, GROUP, round_up
from .shapes import shape_from as shape_from
from .structs import ACTIVATIONS, NO_LIMIT, Batch, Ids, Kernels, Linear, Matrix, Model

Floats = NDArray[np.float32]


class States(NamedTuple):
    """The output of an encoder: vectors of tokens, (T, D), or first tokens, (B, D); and the pooler's, (B, D)."""

    tokens: Floats
    pooled: Floats | None


class PackedLinear:
    """A linear layer and its activation, whose weight is packed for the kernels.

    Args:
        weight: (O, I), floats, or bfloat16 as bits.
        bias: (O,), likewise, or None.
    """

    def __init__(self, kernels: Kernels, weight: NDArray[Any], bias: NDArray[Any] | None, activation: str) -> None:
        self.kernels, self.dtype = kernels, weight.dtype
        self.numbers = "bfloat16" if weight.dtype == np.uint16 else "float32"
        outputs, inputs = weight.shape
        self.outputs, padded, per_word = outputs, round_up(outputs, GROUP), 4 // BYTES[self.numbers]

        # The kernels read whole groups of outputs, so the padding is there and is zero.
        self.bias = np.zeros(padded, dtype=np.float32)
        self.bias[:outputs] = 0 if bias is None else to_floats(bias)
        self.words = aligned(padded * round_up(inputs, per_word) * BYTES[self.numbers])
        floats = np.ascontiguousarray(to_floats(weight))
        kernels.pack(self.numbers, floats.ctypes.data, (outputs, inputs), self.words.ctypes.data, 0, 0, 1)
        matrix = Matrix(self.words.ctypes.data, self.bias.ctypes.data, 0, 0, outputs, inputs)
        self.struct = Linear(matrix, ACTIVATIONS[activation])

    def __call__(self, x: NDArray[Any], threads: int = 1) -> NDArray[Any]:
        """Return (rows, O) for (rows, I), both in the dtype of the weight."""
        out = np.empty((len(x), self.outputs), dtype=self.dtype)
        if len(x):
            x = np.ascontiguousarray(x)
            self.kernels.linear(self.numbers, self.struct, x.ctypes.data, len(x), out.ctypes.data, threads)
        return out


class Encoder:
    """The embeddings, all layers, the pooler and the head of a packed file.

    Raises:
        ValueError: only the library with torch can compute its embeddings.
    """

    def __init__(self, file: PackedFile, kernels: Kernels) -> None:
        about, self.kernels = file.about, kernels
        # The structs of the kernels hold addresses in these arrays, so the arrays must live as long as they do.
        self.numbers, self.embeddings = about["numbers"], about["embeddings"]
        self.prefix = "" if about["class"] == CLASSES[0] else "bert."
        self.tensors, self.layers, self.words = file.tensors, file.layers, file.words  # the structs point into them

        # A file may come from another machine, so the weights are first laid as this machine's kernels read them.
        assert file.shape is not None  # a model has layers, if only none
        shape = lay_in_blocks_(file.shape, self.layers, kernels.blocks[self.numbers])
        self.model = shape.describe(self.layers.ctypes.data)

        # States are stored in bfloat16 only if the weights are; 8-bit integers are for matmuls alone.
        self.dtype = np.dtype(np.uint16 if self.numbers == "bfloat16" else np.float32)
        self.pooler = self.linear(f"{self.prefix}pooler.dense", about["pooler"]) if "pooler" in about else None
        self.means = self.pooler is not None and about["config"].get("pooling") == "mean"
        self.projection = self.linear(f"{self.prefix}embeddings.projection") if self.embeddings["norm"] else None
        self.transform = self.linear("head.dense", pooler_act(about)) if has_transform(about) else None
        self.classifier = None if about["class"] == CLASSES[0] else self.linear("classifier")

    def linear(self, name: str, activation: str = "linear") -> PackedLinear:
        """Return a linear layer of the file."""
        return PackedLinear(self.kernels, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"), activation)

    def run(
        self,
        ids: NDArray[np.int64],
        segments: NDArray[np.int64] | None,
        lengths: list[int],
        first_only: bool = False,
        threads: int = 1,
    ) -> States:
        """Run sequences of tokens, none of them empty.

        Args:
            ids, segments: (T,).
            first_only: return only the first token of each sequence, unless the pooler takes the mean of all.

        Raises:
            ValueError: an id is beyond the vocabulary, or a sequence is longer than the model has positions.
            MemoryError: there is too little memory; give fewer tokens.
        """
        # The kernels write into memory that numpy owns.
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        given = self.ids(ids, segments, ends)
        first_only = first_only and not self.means
        rows = len(lengths) if first_only else len(ids)
        out = np.empty((rows, self.model.hidden_size), dtype=self.dtype)
        batch = Batch(output=out.ctypes.data, is_bfloat16=self.dtype == np.uint16, first_only=first_only)

        pooled = None
        if self.pooler is not None and not self.means:
            pooled = np.empty((len(lengths), self.pooler.outputs), dtype=self.dtype)
            batch.pooler, batch.pooled = ctypes.pointer(self.pooler.struct), pooled.ctypes.data

        # The kernels compute embeddings from ids, but cannot project them: that takes two calls before this one.
        fits = True
        if self.projection is None:
            batch.ids = ctypes.pointer(given)
        else:
            embeds = np.empty((len(ids), self.table("word").shape[1]), dtype=self.dtype)
            fits = self.embed(given, embeds, self.embeddings["epsilon"])
            hidden, starts = self.projection(embeds, threads), ends.astype(np.int64)
            batch.tokens, batch.sequences, batch.starts = len(ids), len(lengths), starts.ctypes.data
            batch.hidden = hidden.ctypes.data

        # The kernels do not say which input was wrong, so it is looked for only after they have refused the batch.
        if not (fits and self.kernels.run(self.model, batch, threads)):
            raise ValueError(self.fault(ids, segments, lengths))
        if self.means:
            means = [POOLINGS["mean"](tokens, 0) for tokens in np.split(to_floats(out), ends[1:-1])]
            pooled = self.apply(self.pooler, np.stack(means), threads)
        if pooled is not None:
            pooled = to_floats(self.normalise(f"{self.prefix}pooler", pooled))
        return States(to_floats(out), pooled)

    def score(self, x: Floats, threads: int) -> Floats:
        """Return a classifier's outputs for tokens or pooled vectors, computed in the model's dtype; (rows, O)."""
        if self.transform is not None:
            x = to_floats(self.normalise("head", self.apply(self.transform, x, threads)))
        return to_floats(self.apply(self.classifier, x, threads))

    def apply(self, layer: PackedLinear | None, x: Floats, threads: int) -> NDArray[Any]:
        """Return a layer's outputs for states, computed and stored in the dtype of the model; (rows, O)."""
        assert layer is not None
        return layer(to_bfloat16(x) if self.dtype == np.uint16 else x, threads)

    def normalise(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        """Return the outputs of a layer, (rows, D), after its LayerNorm if it has one."""
        norm = [self.tensors.get(f"{name}.LayerNorm.{part}") for part in ("weight", "bias")]
        if norm[0] is None or norm[1] is None:
            return x

        # The kernels normalise embeddings: these are of words alone, one for each row.
        ids, ends, zeros = np.arange(len(x), dtype=np.int64), np.array([0, len(x)], np.int32), np.zeros_like(norm[0])
        given = Ids(
            ids=ids.ctypes.data, ends=ends.ctypes.data, rows=1, length=len(x), words=x.ctypes.data, word_count=len(x),
            segment_table=zeros.ctypes.data, segment_count=1, position_count=NO_LIMIT,
            norm_weight=norm[0].ctypes.data, norm_bias=norm[1].ctypes.data,
        )  # fmt: skip
        out = np.empty_like(x)
        self.embed(given, out, self.model.epsilon)
        return out

    def embed(self, given: Ids, out: NDArray[Any], epsilon: float) -> bool:
        """Compute the embeddings as they are before their projection, (T, size); return whether the inputs fit."""
        batch = Batch(output=out.ctypes.data, is_bfloat16=self.dtype == np.uint16, ids=ctypes.pointer(given))
        return self.kernels.run(Model(hidden_size=out.shape[1], epsilon=epsilon), batch, 1)

    def ids(self, ids: NDArray[np.int64], segments: NDArray[np.int64] | None, ends: NDArray[np.int32]) -> Ids:
        """Return the struct of token ids and the tables of embeddings."""
        about, tables = self.embeddings, {name: self.table(name) for name in ("word", "token_type", "position")}

        # Rows of the word embeddings come from the file when they are first needed.
        if self.words is not None:
            self.words.read(ids)

        parts = [self.tensors.get(f"{self.prefix}embeddings.LayerNorm.{part}") for part in ("weight", "bias")]
        norm = [None if part is None else part.ctypes.data for part in parts]

        # A model may have a table of positions and add none of it: then the table only limits the length of sequences.
        has_positions = tables["position"] is not None or self.model.angles
        positions = tables["position"] if about["absolute"] else None
        scales = self.tensors.get(f"{self.prefix}embeddings.{ROW_SCALES}")

        return Ids(
            ids=ids.ctypes.data, segments=None if segments is None else segments.ctypes.data, ends=ends.ctypes.data,
            rows=len(ends) - 1, length=len(ids), words=tables["word"].ctypes.data, word_count=len(tables["word"]),
            word_scales=None if scales is None else scales.ctypes.data,
            segment_table=tables["token_type"].ctypes.data, segment_count=len(tables["token_type"]),
            position_table=None if positions is None else positions.ctypes.data,
            position_count=about["positions"] if has_positions else NO_LIMIT, norm_weight=norm[0], norm_bias=norm[1],
            padding_has_position=about["padding_has_position"], skips_padding=about["skips_padding"],
            padding=-1 if about["padding"] is None else about["padding"],
        )  # fmt: skip

    def table(self, name: str) -> Any:
        return self.tensors.get(f"{self.prefix}embeddings.{name}_embeddings.weight")

    def fault(self, ids: NDArray[np.int64], segments: NDArray[np.int64] | None, lengths: list[int]) -> str:
        """Return the fault of inputs that the kernels refuse, in words."""
        words, kinds = len(self.table("word")), len(self.table("token_type"))
        if not 0 <= ids.min() <= ids.max() < words:
            return f"token ids run from {ids.min()} to {ids.max()}; this model has {words} words, from 0"
        if segments is not None and not 0 <= segments.min() <= segments.max() < kinds:
            return (
                f"segments run from {segments.min()} to {segments.max()}; this model has {kinds}, from 0: take"
                " token_type_ids out of model_input_names in the checkpoint's tokenizer_config.json, and pack it again"
            )
        return f"a sequence has {max(lengths)} tokens; this model has {self.embeddings['positions']} positions"


def to_bfloat16(x: Floats) -> NDArray[np.uint16]:
    """Return floats as bfloat16's bits, rounded to the nearest, and to even."""
    bits = x.view(np.uint32)
    return ((bits + (bits >> 16 & 1) + 0x7FFF) >> 16).astype(np.uint16)


def to_floats(x: NDArray[Any]) -> Floats:
    """Return floats, or bfloat16 given as its bits, as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32, copy=False)
