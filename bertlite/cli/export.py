"""The arguments of `bertlite export`."""

from bertlite.cli.parts import FOLDER, Commands, command, names_of, one_of

DESCRIPTION = """\
Write a dense or pruned checkpoint as ONNX or OpenVINO IR, for batches and lengths of any size, in float32.  The graph
is run beside the model at several shapes with padding, and kept only if its error is as small as torch's own.  The
folder also gets what sentence-transformers and optimum need; it may be the checkpoint's own."""
EXAMPLES = (
    "export sentence-transformers/all-MiniLM-L6-v2 --out minilm-onnx",
    "export runs/half/RUN/model --format openvino --out half-the-heads-openvino",
)
FORMATS = ("onnx", "openvino")


def add(commands: Commands) -> None:
    """Add `export` and its arguments."""
    export = command(
        commands,
        "export",
        "bertlite.shipping.command",
        summary="write a checkpoint as ONNX or OpenVINO IR",
        description=DESCRIPTION,
        examples=EXAMPLES,
        record="what was written, and how it compares with the model",
        out={FOLDER: "the graph, config.json, the tokenizer and export.json"},
        needs=(FOLDER,),
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a hub id or a folder, with its tokenizer")
    export.add_argument(
        "--format",
        type=names_of("format", FORMATS),
        default="onnx",
        metavar="A[,B]",
        help="onnx, openvino or both (default: %(default)s)",
    )
    export.add_argument(
        "--class",
        dest="class_name",
        type=class_name,
        metavar="NAME",
        help="class to load, such as BertForMaskedLM (default: that of config.json, and BertModel for models of"
        " sentence-transformers)",
    )


def class_name(text: str) -> str:
    """Parse the name of a class of bertlite; the table, which imports torch, is read only if a name is given."""
    from bertlite.heads.models import CLASSES

    return one_of("class", tuple(CLASSES))(text)
