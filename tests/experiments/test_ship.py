"""bertlite/experiments/ship.py: the models that experiments make are ready to be shared."""

import numpy as np
import pytest

pytest.importorskip("accelerate")

import bertlite
from bertlite.cli import main
from bertlite.experiments.evaluate import TASKS, interval_over_examples
from bertlite.experiments.ship import metric_figures
from bertlite.experiments.statistics import wilson
from bertlite.support.runs import read_runs
from tests.shipping.worlds import read, save


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A checkpoint, data whose labels are words, a fine-tuned model, and a run that kept its pruned model."""
    folder = tmp_path_factory.mktemp("world")
    save(folder / "base", bertlite.BertForSequenceClassification)
    draw = np.random.default_rng(0)
    for name, count in (("train", 40), ("dev", 23)):
        rows = [
            f"{' '.join(draw.choice(list('abcdefgh'), 5))}\t{draw.choice(['bad', 'good'])}\n" for _ in range(count)
        ]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    data = ["--train", str(folder / "train.tsv"), "--dev", str(folder / "dev.tsv"), "--classes", "bad,good"]
    dense, runs = folder / "dense", folder / "runs"
    words = ["prune", "finetune", str(folder / "base"), *data, "--epochs", "1", "--max-length", "9"]
    assert main([*words, "--out", str(dense)]) == 0
    options = "--calibration 12 --repairs mean --fractions 0.5 --save-model --max-length 9 --criteria magnitude"
    assert main(["prune", "run", str(dense / "model"), *data, *options.split(), "--out", str(runs)]) == 0
    return folder


@pytest.fixture(scope="module")
def kept(world):
    (run,) = read_runs(world / "runs", name="prune")
    return run


@pytest.mark.parametrize("what", ["dense", "kept"])
def test_the_model_of_a_run_names_its_labels_and_does_not_truncate(world, kept, what):
    folder = world / "dense" / "model" if what == "dense" else kept.folder / "model"
    assert read(folder / "config.json")["id2label"] == {"0": "bad", "1": "good"}
    assert read(folder / "tokenizer.json")["truncation"] is None
    assert read(folder / "tokenizer_config.json")["model_max_length"] == 40
    assert len(bertlite.BertTokenizer.from_pretrained(folder).encode("a " * 20)) == 22


def test_the_card_has_the_figures_of_the_run_with_intervals(kept):
    from huggingface_hub import ModelCard

    card = ModelCard.load(kept.folder / "model" / "README.md")
    assert card.data.base_model == "someone/dense"  # what the card of the first checkpoint said
    assert card.data.pipeline_tag == "text-classification"
    right = round(kept.results["accuracy"] * 23)
    low, high = wilson(right, 23)
    dense = kept.results["dense"]["accuracy"]
    line = f"{low:.4g} to {high:.4g}, over 23 examples of dev.tsv | {dense:.4g} |"
    assert f"| accuracy | {right / 23:.4g} | {line}" in card.text
    assert "50 % of the heads were removed by the criterion magnitude, on 12 examples" in card.text
    assert "repaired (mean)" in card.text


def test_the_report_is_of_the_run(kept):
    report = read(kept.folder / "model" / "report.json")
    assert report["heads_kept"] == kept.results["heads_kept"]
    assert report["run"]["config"] == kept.config
    assert report["run"]["environment"]["versions"]["torch"]
    assert report["results"]["accuracy"] == kept.results["accuracy"]
    named = {figure["name"]: figure for figure in report["figures"]}
    assert named["accuracy"]["low"] <= named["accuracy"]["value"] <= named["accuracy"]["high"]
    assert named["multiply-accumulates of the layers, as a share"]["value"] == kept.results["macs"] < 1


def test_the_headline_has_its_interval_whatever_it_is():
    draw = np.random.default_rng(0)
    outputs, labels = draw.normal(size=(30, 1)), draw.normal(size=30)
    task = TASKS["regression"]
    results = {name: metric(outputs, labels) for name, metric in task.metrics.items()}
    first, *others = metric_figures(outputs, labels, task, "dev.tsv", results)
    low, high = interval_over_examples(outputs, labels, task, "spearman")
    assert (first.name, first.low, first.high, first.dense) == ("spearman", low, high, None)
    assert [other.low for other in others] == [None] * len(others)
