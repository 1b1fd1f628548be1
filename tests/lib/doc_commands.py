"""What is executed for each command of the documentation: the shown line, and beside it a line with stand-in data.

A line runs by bash in a copy of the repository (test_docs.py's `clone`) with data/ (the demo set), spm.model, tiny.json
(a model) and dist/open_clip_loss.py (the installed package's); where it names them also runs/first, runs/demo-zero1,
runs/other (finished runs of three steps) and weights.safetensors (of one of them). It has every flag of the shown one;
long runs are made short by more flags.

    here      on a CPU; marker slow, but for the quick ones
    gpu       on a machine with a GPU, multigpu with two; markers of these names
    cluster   as root, on hosts made of namespaces; marker cluster
    by        the test that runs the shown command in some other way
    only      why nothing of ours runs
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    shown: str
    here: str | None = None
    gpu: str | None = None
    multigpu: str | None = None
    cluster: str | None = None
    by: str | None = None
    only: str | None = None
    without: tuple[str, ...] = ()  # flags that the executed line cannot have
    quick: bool = False  # a second or two: in the default suite


SHARDS = "'data/train/{00000..00007}.tar'"
DEMO = f"--train-data {SHARDS} --tokenizer data/tokenizer.model"
TINY = "--model tiny.json --batch-size 8 --accum-freq 2 --warmup 1 --workers 1 --lr 1e-3"
VIT_B = "--batch-size 32 --accum-freq 2 --warmup 1 --workers 4 --steps 3 --compile-blocks off"
COLLECT = "--collect-only -q"
PLAN = "python -m infcl.plan --model ViT-L-14 --gpus 32 --gpu a800-80g"
SWEEP = "python -m infcl.plan --gpu h200 --gpus 8"
SWEEPS = "tests/benchmarks/test_sweeps.py::test_each_line_of_a_sweep_is_a_setting_that_the_trainer_takes"
TOKENIZER = "python -m infcl.data.tokenizer train --train-data"

COMMANDS = [
    Command(
        "source .venv/bin/activate",
        by="tests/project/test_docs.py::test_a_newcomers_shell_runs_a_shown_command_behind_the_shown_activation",
    ),
    # ---- executed as they are shown
    *(
        Command(shown, here=shown)
        for shown in (
            PLAN + " --global-batch 12288k --zero 3",
            PLAN + " --link nic-200 --global-batch 12288k --zero 3",
            f"{SWEEP} --model ViT-L-14 --global-batch 32768 --micro-batch-size 256 --link nic-400 --sweep gpus=8:4096",
            f"{SWEEP} --model ViT-B-32 --global-batch 65536 --micro-batch-size 1024 --link eth-100 --sweep gpus=8:4096",
            "python -m infcl.report runs/demo-zero1",
            "python -m infcl.report runs/demo-zero1 runs/other",
            "python -m tests.lib.data_faults docs/data_faults.md",
            "python -m benchmarks.paper --table 1 --figure 4",
        )
    ),
    # ---- make
    Command(
        "make train",
        here='make train -o "$VENV/.installed" NAME=new FLAGS="--steps 20"',
        gpu='make train -o "$VENV/.installed" NAME=new FLAGS="--steps 20 --compile-blocks off"',
    ),
    Command("make train PRESET=zero3", here='make train -o "$VENV/.installed" PRESET=zero3 NAME=new FLAGS="--steps 5"'),
    *(
        Command(shown, here=f'{shown} -o "$VENV/.installed" --dry-run', quick=True)
        for shown in ("make test", "make test-slow", "make test-cluster", "make coverage")
    ),
    Command("make docs", here='make docs -o "$VENV/.installed"'),
    Command("make lint", here='make lint -o "$VENV/.installed"'),
    # ---- tests: found and collected, for the suite does not run itself
    Command(
        ".venv/bin/python -m pytest tests/engine/test_engine.py -k zero3",
        here=f"python -m pytest tests/engine/test_engine.py -k zero3 {COLLECT}",
    ),
    Command("python -m pytest -m gpu -o addopts=''", here=f"python -m pytest -m gpu -o addopts='' {COLLECT}"),
    Command("python -m pytest -m multigpu -o addopts=''", here=f"python -m pytest -m multigpu -o addopts='' {COLLECT}"),
    Command(
        "pytest -m slow tests/data/test_data_fuzz.py", here=f"pytest -m slow tests/data/test_data_fuzz.py {COLLECT}"
    ),
    Command(
        "python -m pytest -m slow -s tests/loss/test_nt_xent.py",
        here=f"python -m pytest -m slow -s tests/loss/test_nt_xent.py {COLLECT}",
    ),
    Command(
        "python -m pytest -m slow -o addopts='' tests/project/test_docs.py",
        here=f"python -m pytest -m slow -o addopts='' tests/project/test_docs.py {COLLECT}",
    ),
    # ---- data
    Command(
        TOKENIZER + " '/data/{00000..00331}.tar' --vocab-size 32000 --out spm.model",
        here=f"{TOKENIZER} {SHARDS} --vocab-size 60 --out new.model",
    ),
    Command(
        TOKENIZER + " 'shards/{00000..00414}.tar' --vocab-size 32000 --out my.model",
        here=f"{TOKENIZER} {SHARDS} --vocab-size 60 --out my.model",
    ),
    Command(
        "python -m infcl.data.shards index 'shards/{00000..00414}.tar' --jobs 8",
        here=f"python -m infcl.data.shards index {SHARDS} --jobs 2",
    ),
    Command(
        "python -m infcl.data.demo --out DIR [--gallery picture.png]",
        here="python -m infcl.data.demo --out new --gallery picture.png",
    ),
    # ---- training on one host
    Command(
        "deepspeed pretrain_clip.py --train-data '/data/{00000..00331}.tar' --tokenizer spm.model --model ViT-B-16 "
        "--batch-size 256 --accum-freq 16 --grad-checkpointing --warmup 100 --deepspeed_config ds_configs/zero1.json "
        "--epochs 8 --logs runs --name first",
        here=f"deepspeed pretrain_clip.py --train-data {SHARDS} --tokenizer spm.model {TINY} --grad-checkpointing "
        "--deepspeed_config ds_configs/zero1.json --epochs 1 --logs runs --name new",
        gpu=f"deepspeed pretrain_clip.py --train-data {SHARDS} --tokenizer spm.model --model ViT-B-16 {VIT_B} "
        "--grad-checkpointing --deepspeed_config ds_configs/zero1.json --epochs 1 --logs runs --name new",
    ),
    Command(
        "bash launch/local.sh --train-data '/data/{00000..00331}.tar' --tokenizer spm.model --model ViT-B-16 ...",
        here=f"bash launch/local.sh {DEMO} {TINY} --steps 2",
        multigpu=f"bash launch/local.sh {DEMO} --model ViT-B-16 {VIT_B}",
    ),
    Command(
        "bash launch/torchrun.sh --train-data '/data/{00000..00331}.tar' --tokenizer spm.model --model ViT-B-16 ...",
        here=f"RANKS=2 bash launch/torchrun.sh {DEMO} {TINY} --steps 2",
        multigpu=f"bash launch/torchrun.sh {DEMO} --model ViT-B-16 {VIT_B}",
    ),
    Command("bash launch/torchrun.sh FLAGS", here=f"RANKS=2 bash launch/torchrun.sh {DEMO} {TINY} --steps 2"),
    Command(
        "IMAGE=W bash launch/lit.sh --train-data ... --tokenizer ...",
        here=f"IMAGE=runs/first bash launch/lit.sh {DEMO} {TINY} --steps 2",
    ),
    Command(
        "IMAGE=ViT-B-16.safetensors bash launch/lit.sh --train-data '/data/{00000..41455}.tar' --tokenizer spm.model "
        "--global-batch-size 262144 --warmup-samples 140000000",
        here=f"IMAGE=weights.safetensors bash launch/lit.sh {DEMO} {TINY.replace('--warmup 1 ', '')} --accum-freq 1 "
        "--global-batch-size 16 --warmup-samples 16 --steps 2",
    ),
    Command(
        "deepspeed ... pretrain_clip.py ... --dry-run",
        here=f"deepspeed --num_gpus 2 pretrain_clip.py {DEMO} {TINY} --epochs 1 --dry-run",
    ),
    Command(
        "deepspeed pretrain_clip.py --model ViT-bigG-14 --tensor-parallel-size 4 --sequence-parallel ...",
        by="tests/megatron_patches/test_megatron_trainer.py::test_the_launcher_trains_with_tensor_parallel_ranks",
        multigpu=f"deepspeed pretrain_clip.py {DEMO} --model ViT-B-32 {VIT_B} --tensor-parallel-size 2 "
        "--sequence-parallel",
    ),
    Command(
        "bash launch/supervise.sh runs/first bash launch/local.sh --logs runs --name first --resume latest ...",
        here=f"bash launch/supervise.sh runs/new bash launch/local.sh {DEMO} {TINY} --steps 2 --logs runs --name new "
        "--resume latest",
    ),
    Command(
        "bash launch/supervise.sh RUN_FOLDER COMMAND...",
        by="tests/checkpoint/test_faults.py::test_supervise_restarts_a_killed_run_until_it_is_finished",
    ),
    # ---- several hosts
    *(
        Command(
            shown, by="tests/cluster/test_cluster.py::test_two_hosts_train_resume_evaluate_and_export_as_one_rank_does"
        )
        for shown in (
            "deepspeed --hostfile hosts pretrain_clip.py ...",
            "deepspeed --hostfile hosts pretrain_clip.py --train-data ... --deepspeed_config ds_configs/zero1.json",
        )
    ),
    *(
        Command(
            shown, by="tests/cluster/test_cluster_faults.py::test_flags_with_spaces_and_shell_characters_survive_ssh"
        )
        for shown in (
            "HOSTS=hosts bash launch/hostfile.sh FLAGS",
            "HOSTS=hosts bash launch/hostfile.sh --train-data '/data/{00000..41455}.tar' --tokenizer spm.model ...",
        )
    ),
    *(
        Command(shown, by="tests/cluster/test_cluster.py::test_the_openmpi_launcher_trains_too")
        for shown in (
            "LAUNCHER=openmpi HOSTS=hosts bash launch/hostfile.sh FLAGS",
            "LAUNCHER=openmpi HOSTS=hosts INTERFACE=ib0 bash launch/hostfile.sh ...",
        )
    ),
    *(
        Command(
            shown,
            by="tests/cluster/test_cluster.py::test_check_finds_equal_hosts_right_and_names_a_dead_one_and_a_slow_one",
        )
        for shown in (
            "bash launch/check.sh hosts",
            "bash launch/check.sh hosts /shared/folder",
            "bash launch/check.sh HOSTFILE [SHARED_FOLDER]",
        )
    ),
    *(
        Command(
            shown,
            by="tests/cluster/test_cluster_faults.py::test_after_a_crash_supervise_goes_on_with_the_hosts_that_are_left",
        )
        for shown in (
            "bash launch/supervise.sh --hostfile hosts --min-hosts 3 logs/first bash launch/hostfile.sh "
            "--logs logs --name first --global-batch-size 49152 --resume latest ...",
            "bash launch/supervise.sh logs/first bash launch/hostfile.sh --logs logs --name first --resume latest ...",
        )
    ),
    *(
        Command(shown, by="tests/cluster/test_launch.py::test_slurm_is_finished_when_the_summary_is_there")
        for shown in (
            "sbatch --nodes 4 launch/slurm.sbatch FLAGS",
            "sbatch --nodes 4 launch/slurm.sbatch --logs /shared/logs --name first "
            "--train-data '/data/{00000..41455}.tar' ...",
        )
    ),
    Command(
        "kubectl apply -f launch/kubernetes.yaml",
        by="tests/cluster/test_launch.py::test_the_kubernetes_job_is_valid_yaml_of_four_pods",
    ),
    # ---- before and behind a run
    Command(
        "python -m infcl.plan --compare docs/results/plan_steps_4gpu.csv",
        here="python -m infcl.plan --compare docs/results/plan_steps.csv",
    ),
    Command("python -m infcl.plan", here="python -m infcl.plan --help"),
    *(
        Command(f"python -m infcl.convert.export RUN{flags}", here=f"python -m infcl.convert.export runs/first{flags}")
        for flags in ("", " --format open_clip", " --format hf", " --format safetensors", " --ema")
    ),
    Command(
        "python -m infcl.evaluate --checkpoint RUN --ema ...",
        here="python -m infcl.evaluate --checkpoint runs/first --ema --task zeroshot --data data/zeroshot",
    ),
    Command("python -m infcl.evaluate", here="python -m infcl.evaluate --help"),
    Command(
        "python -m infcl.evaluate --checkpoint runs/first --task zeroshot --data imagenet/val "
        "--zeroshot-classnames names.txt --zeroshot-templates templates.txt",
        here="python -m infcl.evaluate --checkpoint runs/first --task zeroshot --data data/zeroshot "
        "--zeroshot-classnames data/zeroshot/classnames.txt --zeroshot-templates data/zeroshot/templates.txt",
    ),
    Command(
        "torchrun --nproc-per-node 8 -m infcl.evaluate --checkpoint ViT-B-32.safetensors --model ViT-B-32 "
        "--task retrieval --data coco/captions.jsonl --precision amp_bf16 --out results.jsonl",
        here="torchrun --nproc-per-node 2 -m infcl.evaluate --checkpoint weights.safetensors --model tiny.json "
        "--tokenizer data/tokenizer.model --task retrieval --data captions.jsonl --precision amp_bf16 "
        "--out results.jsonl",
    ),
    # ---- measurements
    Command("python -m benchmarks.data", here="python -m benchmarks.data --images 8 --rounds 1 --size 256"),
    Command(
        "python -m benchmarks.data_memory", here="python -m benchmarks.data_memory --epochs 8 --settle 6 --images 64"
    ),
    Command(
        "python -m benchmarks.retrieval --pairs 1048576 --gpus 1",
        here="python -m benchmarks.retrieval --pairs 512 --gpus 0",
        gpu="python -m benchmarks.retrieval --pairs 16384 --gpus 1",
    ),
    Command(
        "python -m benchmarks.retrieval --pairs 4096,16384 --dim 512 --tile 2048 "
        "--open-clip .../open_clip_train/metrics.py --dense-max 4096",
        here="python -m benchmarks.retrieval --pairs 256,512 --dim 512 --tile 2048 --dense-max 256",
        without=("--open-clip",),  # no release has the chunked metrics that it wants
    ),
    Command(
        "python -m benchmarks.loss --impl ... --batch ...",
        gpu="python -m benchmarks.loss --impl inf_cl,clip,siglip --batch 4096 --repeats 2",
    ),
    Command("python -m benchmarks.loss --check", gpu="python -m benchmarks.loss --check"),
    Command("python -m benchmarks.tiling", gpu="python -m benchmarks.tiling --batch 16384 --repeats 2"),
    Command(
        "python -m benchmarks.step",
        gpu="python -m benchmarks.step --model ViT-B-32 --batch-size 64 --measured-steps 1 --warm-up-steps 0 "
        "--compile-blocks off",
    ),
    Command(
        "python -m benchmarks.step --gpus 4 --model ViT-B-16 --batch-size 512 --accum-freq 512 --zero 1 "
        "--precision bf16 --measured-steps 1 --warm-up-steps 0 --pixel-cache gpu",
        multigpu="python -m benchmarks.step --gpus 2 --model ViT-B-32 --batch-size 64 --accum-freq 4 --zero 1 "
        "--precision bf16 --measured-steps 1 --warm-up-steps 0 --pixel-cache gpu --compile-blocks off",
    ),
    Command(
        "python -m benchmarks.step --gpus 2 --grad-checkpointing --precision bf16 --batch-size 256 --accum-freq 4 "
        "--zero 3",
        multigpu="python -m benchmarks.step --gpus 2 --grad-checkpointing --precision bf16 --batch-size 8 "
        "--accum-freq 4 --zero 3 --model ViT-B-32 --measured-steps 1 --warm-up-steps 0 --compile-blocks off",
    ),
    Command(
        "python -m benchmarks.step --gpus 2 --batch-size 128 --zero 1 --compile-blocks on",
        multigpu="python -m benchmarks.step --gpus 2 --batch-size 8 --model ViT-B-32 --measured-steps 1 "
        "--warm-up-steps 0 --zero 1 --compile-blocks on",
    ),
    Command(
        "python -m benchmarks.step --gpus 2 --batch-size 128 --zero 1 --compile-blocks on "
        '--zero-options \'{"overlap_comm": true, "reduce_bucket_size": 500000000}\'',
        multigpu="python -m benchmarks.step --gpus 2 --batch-size 8 --model ViT-B-32 --measured-steps 1 "
        "--warm-up-steps 0 --zero 1 --compile-blocks on "
        '--zero-options \'{"overlap_comm": true, "reduce_bucket_size": 500000000}\'',
    ),
    Command(
        "python -m benchmarks.step --gpus 4 --sweep benchmarks/sweeps/plan.txt --csv docs/results/plan_steps_4gpu.csv",
        multigpu="grep -v '#' benchmarks/sweeps/plan.txt | tail -1 > one.txt && "
        "python -m benchmarks.step --gpus 2 --measured-steps 1 --sweep one.txt --csv new.csv && "
        "python -m infcl.plan --compare new.csv",
    ),
    Command(
        "python -m benchmarks.kernels runs/NAME/profile/trace_rank0.json.gz --steps 3",
        by="tests/benchmarks/test_kernel_times.py::test_a_trace_becomes_rows_and_shares",
    ),
    Command(
        "python -m benchmarks.step --sweep benchmarks/sweeps/step_1gpu.txt --csv docs/results/step.csv",
        here="echo --model tiny.json --batch-size 8 --measured-steps 1 --warm-up-steps 0 --device cpu > one.txt && "
        "python -m benchmarks.step --sweep one.txt --csv new.csv && grep -q eager new.csv",
    ),
    *(
        Command(
            f"python -m benchmarks.step {flags}--sweep benchmarks/sweeps/{name}.txt --csv docs/results/{out}.csv",
            by=SWEEPS,
        )
        for flags, name, out in (
            ("--one-process ", "captions_1gpu", "step_captions"),
            ("--one-process ", "attention_1gpu", "step_attention"),
            ("--one-process ", "attention_vit_b_16", "step_attention"),
            ("--one-process ", "resident_1gpu", "step_resident"),
            ("", "step_zero3_1gpu", "step"),
            ("", "step_zero3_8gpu", "step"),
            ("--time-out 400 ", "step_bigg_1gpu", "step"),
            ("--time-out 400 ", "step_8gpu", "step"),
            ("--time-out 400 ", "step_table1_8gpu", "step"),
            ("--one-process ", "short_1gpu", "optimizers"),
        )
    ),
    Command(
        "python -m benchmarks.tensor_parallel --gpus 8",
        multigpu="python -m benchmarks.tensor_parallel --gpus 2 --models ViT-B-32 --sizes 1,2 --stages 1 --repeats 3 "
        "--compile-blocks off",
    ),
    Command(
        "python -m benchmarks.attention --csv docs/results/attention.csv",
        gpu="python -m benchmarks.attention --repeats 2 --csv new.csv",
    ),
    Command(
        "python -m benchmarks.tensor_parallel_layers",
        multigpu="python -m benchmarks.tensor_parallel_layers --repeats 2",
    ),
    Command(
        "python -m benchmarks.rings --csv docs/results/rings.csv",
        cluster="python -m benchmarks.rings --csv new.csv --hosts 2 --ranks 2 --rows 32 --repeats 1",
    ),
    Command(
        "python -m benchmarks.ranks --csv docs/results/ranks_32.csv",
        cluster="python -m benchmarks.ranks --csv new/ranks.csv --hosts 2 --slots 1 --steps 1",
    ),
    # ---- the paper's tables and figures
    Command("make results", here='make results -o "$VENV/.installed"'),
    Command(
        "python -m benchmarks.accuracy --study losses --seeds 5 --out docs/results --work .data/accuracy --device cuda "
        "--gpus 2 --jobs 30",
        here="python -m benchmarks.accuracy --study losses --seeds 1 --out new --work work --num-train 600 --steps 2 "
        "--losses clip siglip --device cpu --gpus 1 --jobs 2",
    ),
    Command(
        "python -m benchmarks.accuracy --study batch-size --num-train 131072 --out docs/results --work .data/accuracy "
        "--device cuda --jobs 19 --seeds 1",
        here="python -m benchmarks.accuracy --study batch-size --num-train 600 --out new --work work --seeds 1 "
        "--samples 512 --batches 64 128 --lr-scalings sqrt --device cpu --jobs 2",
    ),
    Command(
        "python -m benchmarks.gradients --out docs/results",
        here="python -m benchmarks.gradients --out new --work work --num-train 600 --batch 32 --ranks 2",
    ),
    Command(
        "python -m benchmarks.demo --csv docs/results/demo.csv",
        here="python -m benchmarks.demo --presets zero2,zero3 --data new --csv new.csv --steps 2",
    ),
    Command(
        "python -m benchmarks.hard_negatives --out docs/results",
        here="python -m benchmarks.hard_negatives --out new --seeds 1 --steps 3 --batch 16",
    ),
    Command(
        "python -m benchmarks.largest_batch --gpus 4 --model ViT-L-14 --batch-size 128 --precision amp_bf16 "
        "--no-checkpointing --loss inf_cl clip open_clip --pixels gpu host --pixel-cache-gb 0 "
        "--at 32768 65536 131072 262144 1048576",
        here="python -m benchmarks.largest_batch --gpus 2 --model demo --batch-size 16 --precision fp32 "
        "--no-checkpointing --loss inf_cl clip open_clip --pixels gpu host --pixel-cache-gb 0 --at 64 96 --device cpu",
        multigpu="python -m benchmarks.largest_batch --gpus 2 --model ViT-B-32 --batch-size 128 --precision amp_bf16 "
        "--no-checkpointing --loss inf_cl clip open_clip --pixels gpu host --pixel-cache-gb 0 --at 8192",
    ),
    Command(
        "python -m benchmarks.largest_batch --model ViT-L-14 --gpus 1 --batch-size 128 --pixels host "
        "--pixel-cache-gb 2 --memory-gb 139 --at 4096 131072",
        here="python -m benchmarks.largest_batch --model demo --gpus 1 --batch-size 16 --pixels host "
        "--pixel-cache-gb 2 --memory-gb 139 --at 32 64 --device cpu --precision fp32",
    ),
    Command(
        "python -m benchmarks.largest_batch --model ViT-L-14 --gpus 4 --pixels gpu host --pixel-cache-gb 0 "
        "--max-batch 4194304",
        multigpu="python -m benchmarks.largest_batch --model ViT-B-32 --gpus 2 --pixels gpu host --pixel-cache-gb 0 "
        "--max-batch 16384 --memory-gb 8",
    ),
    Command(
        "python -m benchmarks.loss --gpus 4 --impl inf_cl,official_open_clip,official --batch 131072 "
        "--open-clip-loss DIR/src/open_clip/loss.py",
        multigpu="python -m benchmarks.loss --gpus 2 --impl inf_cl,official_open_clip --batch 16384 --repeats 2 "
        "--open-clip-loss dist/open_clip_loss.py",
    ),
    Command(
        "python -m benchmarks.step_losses --csv docs/results/step_losses.csv --repeats 3 --seconds 35",
        here="python -m benchmarks.step_losses --csv new.csv --model demo --batch-size 16 --batches 32 --repeats 1 "
        "--seconds 35 --warm-up 0 --impl inf_cl,clip,official_open_clip --device cpu",
        gpu="python -m benchmarks.step_losses --csv new.csv --batches 1024,2048 --repeats 1 --seconds 35 --warm-up 0 "
        "--impl inf_cl,clip,official_open_clip --compile-blocks off",
    ),
    Command(
        "python -m benchmarks.peers_train --csv docs/results/peers_train.csv "
        "--inf-clip ../Inf-CLIP --fast-clip ../fast_clip --eva-clip ../EVA",
        here="python -m benchmarks.peers_train --csv new.csv --programs infcl --model $PWD/tiny.json --batch-size 8 "
        "--accum-freq 2 --blocks eager --precision fp32 --workers 0 --steps 2 --warm-up 1 --device cpu",
        gpu="python -m benchmarks.peers_train --csv new.csv --programs infcl --model ViT-B-32 --batch-size 32 "
        "--accum-freq 2 --blocks eager --workers 0 --steps 2 --warm-up 1",
        without=("--inf-clip", "--fast-clip", "--eva-clip"),  # checkouts of others
    ),
    Command("python -m benchmarks.step --peer CHECKOUT", only="needs a checkout of open_clip and a GPU"),
    # ---- packages: ours, others'
    *(
        Command(shown, by="tests/project/test_wheel.py::test_the_wheel_is_whole_and_the_loss_runs_from_it")
        for shown in ("pip install .", "pip install '.[triton,megatron]'")
    ),
    *(
        Command(shown, only="installs a package of others")
        for shown in (
            "pip install s3fs",
            "pip install wandb",
            "pip install 'bitsandbytes>=0.49,<0.51'",
            "pip install inf_cl==1.2.1",
            "pip install pandas iopath nvidia-ml-py",
            "git clone https://github.com/DAMO-NLP-SG/Inf-CLIP ../Inf-CLIP",
            "git clone https://github.com/Optimization-AI/fast_clip ../fast_clip",
            "git clone https://github.com/baaivision/EVA ../EVA",
        )
    ),
]

# File and number of a python block -> the test that executes it.
PYTHON_BLOCKS = {
    "README.md 0": "tests/project/test_docs.py::test_the_readmes_loss_runs_as_shown",
    "docs/loss.md 0": (
        "tests/loss/test_drop_in.py::test_the_documented_ddp_loop_trains_as_one_process_on_the_whole_batch"
    ),
    "docs/megatron.md 0": "tests/project/test_docs.py::test_the_documented_megatron_loop_is_made_of_what_there_is",
}
