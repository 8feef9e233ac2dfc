"""The table of kinds of positions: what it says of a kind is true of a model of that kind."""

import pytest
from conftest import make

from bertlite.config import POSITIONS
from bertlite.stack.embeddings import FamilyEmbeddings
from bertlite.stack.modules import BertEmbeddings
from bertlite.stack.positions import DISTANCES

N = 4


def test_both_tables_have_the_same_kinds() -> None:
    assert [*POSITIONS] == [*DISTANCES]


@pytest.mark.parametrize("kind", DISTANCES)
def test_an_attention_has_the_table_and_the_projections_of_its_kind(kind: str) -> None:
    model, entry = make(position_embedding_type=kind), DISTANCES[kind]
    own = model.encoder.layer[0].attention.self
    tables = {name: tuple(x.shape) for name, x in own.named_parameters() if name.startswith("distance_")}
    table = entry.table(model.config, N)
    assert tables == ({} if table is None else {"distance_embedding.weight": table})
    assert {*entry.projections} == own.projections().keys() - {"query", "key", "value"}
    assert model.embeddings.adds_positions == POSITIONS[kind].in_embeddings


@pytest.mark.parametrize(
    "change",
    [
        {"embedding_size": 20},
        {"positions_skip_padding": True},
        {"padding_has_position": True},
        {"position_biased_input": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_only_other_families_have_other_embeddings_than_bert(change: dict[str, object]) -> None:
    assert type(make().embeddings) is BertEmbeddings
    assert type(make(**change).embeddings) is FamilyEmbeddings
