"""A plugin that runs transformers' own tests of BERT with bertlite's classes in place of its own.

    git clone --depth 1 --branch v5.24.0 https://github.com/huggingface/transformers && cd transformers
    export PYTHONPATH=BERTLITE HF_HUB_OFFLINE=1    # the checkout of bertlite
    python -m pytest -q tests/models/bert/test_modeling_bert.py                              # with its own classes
    python -m pytest -q tests/models/bert/test_modeling_bert.py -p scripts.stress.hf_suites  # with bertlite's

The clone must be of the version of transformers that this Python has installed, since its tests hold for no other.
The second run should fail in no test that passes in the first.  The tests need the package `parameterized`.
"""


def pytest_configure() -> None:
    """Make every name by which transformers knows a BERT class mean bertlite's, in this process."""
    import transformers
    from transformers.models.bert import modeling_bert

    from bertlite import hf

    for name in hf.__all__:
        ours = getattr(hf, name)
        if isinstance(ours, type) and issubclass(ours, transformers.PreTrainedModel):
            for module in (transformers, transformers.models.bert, modeling_bert):
                setattr(module, name, ours)
    hf.register()
