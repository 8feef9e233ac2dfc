"""The table of the families: what makes a BERT of each, and how near transformers' own class it is."""

from bertlite.checkpoint.families import FAMILIES
from scripts.make.tables import read
from scripts.make.tables.proof import verdict
from scripts.make.tables.read import measured_on, records

HEAD = ("`model_type`", "what makes a BERT of it, beside other names", "tensors", "outputs", "gradients", "float32")


def families() -> str:
    """Return a row for each way to become a BERT, with the largest differences over all records."""
    files = records("families-[0-9]*.json")
    kinds: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        if family.becomes:
            kinds.setdefault(family.becomes, []).append(kind)
    body = []
    for becomes, group in kinds.items():
        found = [section for record in files for section in record["families"].values()]
        claims = [claim for section in found if section["model_type"] in group for claim in section["claims"]]
        exact = [claim for claim in claims if claim["dtype"] == "float64"]
        parts = ([c for c in exact if ("gradient" in c["claim"]) == gradients] for gradients in (False, True))
        errors = (f"{max(claim['max_error'] for claim in part):.0e}" for part in parts)
        ratio = max(claim["max_ratio"] or 0 for claim in claims if claim["dtype"] == "float32")
        failed = verdict(claims).replace("all", "")
        count = f"{sum(claim['tensors'] for claim in claims):,}{failed and f', {failed}'}"
        body.append([", ".join(f"`{kind}`" for kind in group), becomes, count, *errors, f"{ratio:.2f}"])
    versions = " and ".join(record["environment"]["versions"]["transformers"] for record in files)
    return read.table(
        HEAD,
        body,
        f"Beside transformers {versions}, with random weights of a small shape and of a base model's, padding on the"
        " left, on the right and none; eager, sdpa, packed and the native kernels. The largest difference of outputs"
        " and of gradients in float64, and the largest ratio of our rms error to theirs in float32. Measured on"
        f" {measured_on(files[0])}.",
    )
