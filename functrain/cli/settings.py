"""What a training run is asked to do, as plain data."""

from dataclasses import dataclass
from pathlib import Path

TOKENIZERS = ("bpe", "bytes")
OPTIMIZERS = ("muon", "adamw", "lion", "sgd")
PRECISIONS = ("fp32", "bf16")
BACKENDS = ("auto", "eager", "inductor")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainSettings:
    """One field an option of `functrain train`."""

    model: str = "tiny"  # a name in `functrain.models.gpt.SIZES`
    data: Path | None = None  # None: the source code of Python's standard library
    field: str = "text"  # of a JSON line
    tokenizer: str = "bpe"  # or "bytes"
    vocab: int | None = None  # token ids of the BPE; None: the model's
    held_out: float = 0.03  # fraction of the text for validation
    seq: int | None = None  # tokens in a row; None: the model's context
    dropout: float = 0.0  # rate
    steps: int = 350  # optimizer steps
    minutes: float | None = None  # of training, after which the run ends early
    batch: int = 16  # rows in a batch
    microbatches: int = 1  # parts that a batch is worked through in
    optimizer: str = "muon"  # a name in OPTIMIZERS
    lr: float | None = None  # peak learning rate; None: the optimizer's
    warmup: int = 20  # steps
    weight_decay: float = 0.1  # of matrices
    clip: float = 1.0  # largest norm of the gradients
    seed: int = 0  # of init, shuffling, dropout and sample
    precision: str = "fp32"  # or "bf16": params in fp32, computation in bf16
    backend: str = "auto"  # of `functrain.jit`
    device: str = "auto"  # "auto" is cuda where there is one
    nproc: int | None = None  # ranks to start on this machine; None: those of the plan, or one
    plan: Path | None = None  # TOML of a `functrain.Plan`; None: ZeRO-3 over all ranks
    remat: bool = False  # whether the backward pass computes the blocks again
    eval_every: int = 100  # steps
    out: Path | None = None  # the run folder; None: runs/MODEL-DATE-TIME
