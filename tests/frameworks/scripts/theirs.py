"""The scripts: where they are, what lets them run on CPUs, and what MLflow then has to hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from frameworks.contracts.suites import Repository
from frameworks.scripts import tiny_data

EXAMPLES = Repository(
    "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
)
NANOGPT = Repository(
    "https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
)
TORCHVISION = Repository(
    "https://github.com/pytorch/vision", "428a54c96e82226c0d2d8522e9cbfdca64283da0"
)
TIMM = Repository(
    "https://github.com/huggingface/pytorch-image-models",
    "aa4b5850c1543fa488abf260f18390eda46cf85d",
)
TRANSFORMERS = Repository(
    "https://github.com/huggingface/transformers", "cc041637bc2b3639bba0b8f85672c1653cdb6248"
)


@dataclass(frozen=True)
class Script:
    """A training script that was written without RankZero.

    `on_cpus`: what its authors wrote for GPUs only, by file, and what replaces it. `words` end with
    those of the first call or of the second, which resumes. `train`, `val`: the steps that MLflow
    has at the end. `kept`: where a checkpoint is.
    """

    source: Repository
    path: str
    write_data: Callable[[Path], None]
    words: str
    first: str
    second: str
    train: list[int]
    val: dict[str, list[int]]
    params: dict[str, str]
    processes: int = 2
    kept: str = "mlruns/runs/*/checkpoints/step_*"
    on_cpus: tuple[tuple[str, str, str], ...] = ()


SCRIPTS = {
    "mnist": Script(
        EXAMPLES,
        "mnist/main.py",
        tiny_data.digits,
        "--batch-size 16 --test-batch-size 32 --log-interval 1 --no-accel",
        "--epochs 1",
        "--epochs 2",
        [*range(1, 9)],
        {"val/loss": [4, 8], "val/accuracy": [4, 8]},
        {"batch_size": "16", "lr": "1.0"},
        processes=1,
    ),
    "imagenet": Script(
        EXAMPLES,
        "imagenet/main.py",
        tiny_data.photos,
        "data -a resnet18 -b 4 -j 0 -p 1 --no-accel --dist-url env:// --dist-backend gloo",
        "--epochs 1",
        "--epochs 2 --resume checkpoint.pth.tar",
        [*range(1, 7)],
        {"val/acc1": [3, 6]},
        {"batch_size": "4", "arch": "resnet18"},
    ),
    "ddp_tutorial": Script(
        EXAMPLES,
        "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        tiny_data.none,
        "--batch_size 512",
        "2 1",
        "4 1",
        [*range(10)],
        {},
        {"batch_size": "512", "save_every": "1"},
        on_cpus=(
            (
                "multigpu_torchrun.py",
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
                "pass",
            ),
            ("multigpu_torchrun.py", "nccl", "gloo"),
            ("multigpu_torchrun.py", ".to(self.gpu_id)", '.to("cpu")'),
            ("multigpu_torchrun.py", "cuda:{self.gpu_id}", "cpu"),
            ("multigpu_torchrun.py", ", device_ids=[self.gpu_id]", ""),
        ),
    ),
    "nanogpt": Script(
        NANOGPT,
        "train.py",
        tiny_data.letters,
        "--dataset=tiny --device=cpu --backend=gloo --compile=False --dtype=float32 --n_layer=1 "
        "--n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --gradient_accumulation_steps=2 "
        "--eval_interval=10 --eval_iters=2",
        "--max_iters=10",
        "--max_iters=20 --init_from=resume",
        [*range(21)],
        {"val/loss": [0, 10, 20]},
        {"n_layer": "1", "learning_rate": "0.0006"},
        on_cpus=(
            ("train.py", "f'cuda:{ddp_local_rank}'", "'cpu'"),
            ("train.py", "torch.cuda.set_device(device)", "pass"),
            ("train.py", ", device_ids=[ddp_local_rank]", ""),
        ),
    ),
    "torchvision": Script(
        TORCHVISION,
        "references/classification/train.py",
        tiny_data.photos,
        "--data-path data --device cpu -b 4 -j 0 --print-freq 1 --val-resize-size 32 "
        "--val-crop-size 32 --train-crop-size 32",
        "--epochs 1",
        "--epochs 2",
        [*range(1, 7)],
        {"val/loss": [3, 6], "val/acc1": [3, 6]},
        {"batch_size": "4", "model": "resnet18"},
        on_cpus=(
            ("train.py", ", device_ids=[args.gpu]", ""),
            ("utils.py", "torch.cuda.set_device(args.gpu)", "pass"),
            ("utils.py", '"nccl"', '"gloo"'),
            ("utils.py", 'device="cuda"', 'device="cpu"'),
        ),
    ),
    "timm": Script(
        TIMM,
        "train.py",
        tiny_data.photos,
        "--data-dir data --model test_resnet --num-classes 5 --img-size 32 -b 4 -j 1 --device cpu "
        "--no-prefetcher --output out --experiment first --warmup-epochs 0",
        "--epochs 1",
        "--epochs 2 --resume out/first/last.pth.tar",
        [*range(1, 5)],
        {"val/loss": [2, 4], "val/top1": [2, 4]},
        {"batch_size": "4", "model": "test_resnet"},
        kept="mlruns/artifacts/**/last.pth.tar",
        on_cpus=(("train.py", "device_ids=[device]", "device_ids=None"),),
    ),
    "run_clm": Script(
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_clm.py",
        tiny_data.words,
        "--train_file train.txt --validation_file val.txt --tokenizer_name tokenizer "
        "--model_type gpt2 --config_overrides "
        "n_layer=1,n_head=2,n_embd=16,n_positions=16,vocab_size=32 --block_size 16 --use_cpu "
        "--do_train --do_eval --per_device_train_batch_size 2 --logging_steps 1 --report_to none "
        "--eval_strategy epoch --save_strategy epoch --output_dir out",
        "--num_train_epochs 1",
        "--num_train_epochs 2 --resume_from_checkpoint out/checkpoint-4",
        [*range(1, 9)],
        {"val/loss": [4, 8], "val/accuracy": [4, 8]},
        {"per_device_train_batch_size": "2", "learning_rate": "5e-05"},
        kept="out/checkpoint-8",
    ),
}
