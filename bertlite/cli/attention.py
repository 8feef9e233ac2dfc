"""The arguments of `bertlite attention`."""

from bertlite.cli.parts import Commands, command, integers

DESCRIPTION = """\
Draw the attention weights that each head of a model gives to the tokens of a text, as an interactive HTML page or as a
PNG.  Heads are numbered as in the unpruned model; pruned ones are blank.  --against compares two checkpoints,
such as a dense and a pruned one, head by head."""
EXAMPLES = (
    'attention google-bert/bert-base-uncased "The cat sat on the mat." --out maps.html',
    'attention my-model "Who sat?" --pair "The cat sat." --layers 0,1,11 --heads 3 --out maps.png,maps.json',
    'attention google-bert/bert-base-uncased "The cat sat on the mat." --against my-model --out compared.html',
)


def add(commands: Commands) -> None:
    """Add `attention` and its arguments."""
    attention = command(
        commands,
        "attention",
        "bertlite.attention_view.command",
        summary="draw the attention weights of a model for a text",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="the tokens and all weights",
        out={".html": "a page", ".png": "a picture, which needs the extra plot"},
        needs=(".html", ".png", ".json"),
    )
    attention.add_argument("checkpoint", metavar="CHECKPOINT", help="a hub id or a folder, with its tokenizer")
    attention.add_argument("text", metavar="TEXT", help="the text for the model")
    attention.add_argument("--revision", help="a branch, tag or commit of the hub (default: main)")
    attention.add_argument("--pair", metavar="TEXT", help="a second text, after the first one's [SEP] (default: none)")
    attention.add_argument(
        "--against",
        metavar="CHECKPOINT",
        help="compare with this checkpoint, of the same tokenizer (or without one), layers and heads (default: none)",
    )
    attention.add_argument("--layers", type=integers, metavar="A,B", help="layers to draw (default: all)")
    attention.add_argument("--heads", type=integers, metavar="A,B", help="heads of these layers (default: all)")
