"""The arguments of `bertlite convert`."""

from bertlite.cli.parts import FOLDER, Commands, command

DESCRIPTION = """\
Write a checkpoint of another family, such as RoBERTa, XLM-R, DistilBERT, MPNet or ELECTRA, as a BERT's, with its
tokenizer and sentence-transformers' modules.  Where transformers is installed, the result is first compared with
transformers' own class in float64, and not written if they differ."""
EXAMPLES = (
    "convert sentence-transformers/all-MiniLM-L6-v2 --out minilm-as-bert",
    "convert fast --full --out all-heads --json",
)


def add(commands: Commands) -> None:
    """Add `convert` and its arguments."""
    convert = command(
        commands,
        "convert",
        "bertlite.shipping.convert",
        summary="write a checkpoint of another family as a BERT's",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="the family, and the differences from transformers",
        out={FOLDER: "the model, its tokenizer and a card"},
        needs=(FOLDER,),
    )
    convert.add_argument("checkpoint", metavar="CHECKPOINT", help="a hub id or a folder, with its tokenizer")
    convert.add_argument(
        "--full",
        action="store_true",
        help="put pruned heads and neurons back, with weights of zero, for loaders that know none",
    )
