"""The launch scripts as far as a shell can tell: what they run, what they reject, when a run is queued again."""

import subprocess

import pytest

from tests.lib.checkout import ROOT
from tests.lib.launch_scripts import run

SLURM = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
FLAGS = ["--logs", "logs", "--name", "first"]


def slurm(tmp_path, srun: str, *arguments, **environment: str):
    scontrol = 'case $1 in show) echo n1; echo n2;; *) echo "scontrol $*";; esac\n'
    programs = {"srun": srun, "scontrol": scontrol}
    return run("slurm.sbatch", *arguments, tmp_path=tmp_path, programs=programs, **SLURM | environment)


SAVES = 'mkdir -p logs/first/checkpoints; echo "step_$SLURM_RESTART_COUNT" > logs/first/checkpoints/latest; '
FINISHES, IN_CONTAINER = "mkdir -p logs/first; touch logs/first/summary.json; exit 138\n", {"CONTAINER_MOUNTS": "/a,/b"}
MOUNTS = "{0}:{0},/a:/a,/b:/b"
PYXIS = f"--container-image=i.sqsh --container-mounts={MOUNTS} --container-workdir={{0}} python -u pretrain_clip.py"
APPTAINER = f"apptainer exec --nv --bind {MOUNTS} --pwd {{0}} i.sif python -u pretrain_clip.py"


@pytest.mark.parametrize(
    ("srun", "flags", "environment", "code", "printed"),
    [
        *(  # a long run is queued again at every time limit: those are no failures
            (
                f"{SAVES} exit {code}\n",
                FLAGS,
                {"SLURM_RESTART_COUNT": restart},
                0,
                f"exit code {code} after step_",
            )
            for code, restart in ((138, "0"), (143, "1"), (1, "50"), (137, "0"))
        ),
        *((f"{SAVES} exit {code}\n", FLAGS, {}, code, "") for code in (0, 2, 65, 130)),
        (FINISHES, FLAGS, {}, 0, ""),  # the folder is read from the flags as the program reads them
        (FINISHES, ["--logs=logs", "--name=first"], {}, 0, ""),
        (FINISHES, ["--name", "x", *FLAGS], {}, 0, ""),
        ('echo "$*"; exit 2\n', FLAGS, IN_CONTAINER | {"CONTAINER": "i.sqsh"}, 2, f"--wait=300 {PYXIS}"),
        ('echo "$*"; exit 2\n', FLAGS, IN_CONTAINER | {"CONTAINER": "i.sif"}, 2, f"--wait=300 {APPTAINER}"),
        ("echo started\n", ["--logs", "logs"], {}, 2, "--logs and --name are missing"),
    ],
)
def test_slurm_queues_a_run_with_a_new_checkpoint_again_and_nothing_else(
    tmp_path, srun, flags, environment, code, printed
):
    result = slurm(tmp_path, srun, *flags, **environment)
    output = result.stdout + result.stderr
    assert result.returncode == code and printed.format(tmp_path) in output and "started" not in output, output
    assert ("scontrol requeue 7" in output) == ("queued again" in output) == printed.startswith("exit code"), output
    assert printed or not output


@pytest.mark.parametrize("code", [138, 1])
def test_slurm_gives_up_after_so_many_failures_without_a_new_checkpoint(tmp_path, code):
    """Also when the time that is left for a start is too short (138); another job counts for itself."""

    def reported(program: str) -> str:
        result = slurm(tmp_path, program, *FLAGS, SLURM_RESTART_COUNT="50", MAX_RESTARTS="2")
        assert ("scontrol requeue 7" in result.stdout) == (result.returncode == 0) == ("queued again" in result.stdout)
        assert result.stderr == ""
        return result.stdout.partition("; queued again")[2].splitlines()[0] if result.returncode == 0 else "given up"

    fails = f"exit {code}\n"
    assert [reported(fails), reported(SAVES + fails), reported(fails)] == [", restart 1 of 2", "", ", restart 1 of 2"]
    (tmp_path / "logs" / "first.failures").write_text("6 2\n")
    assert [reported(fails) for _ in range(3)] == [", restart 1 of 2", ", restart 2 of 2", "given up"]
    assert not (tmp_path / "logs" / "first.failures").exists()


def test_slurm_gives_up_where_failures_cannot_be_counted(tmp_path):
    """A full disk, say: it would be the first failure each time."""
    (tmp_path / "logs" / "first.failures").mkdir(parents=True)
    result = slurm(tmp_path, "exit 1\n", *FLAGS)
    assert result.returncode == 1 and "requeue" not in result.stdout, result.stdout
    nested = slurm(tmp_path, "exit 1\n", "--logs", "logs", "--name", "a/b")
    assert "restart 1 of 10" in nested.stdout and (tmp_path / "logs" / "a" / "b.failures").read_text() == "7 1\n"


SSH = 'case "$*" in *hostname*) echo "10.0.0.1 fe80::1 ";; *) echo "2: eth0    inet 10.0.0.1/24 brd";; esac\n'
HOSTFILE = {"python": "exit 0\n", "ssh": SSH, "deepspeed": 'printf "%s|" "$@"\n'}


@pytest.fixture
def hostfile(tmp_path):
    """Run launch/hostfile.sh over one host, with other programs or variables."""
    (tmp_path / "hosts").write_text("a slots=1\n")

    def start(*flags, programs=HOSTFILE, **environment):
        return run("hostfile.sh", *flags, tmp_path=tmp_path, programs=HOSTFILE | programs, **environment)

    return start


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("WANDB_API_KEY=hunter2", "WANDB_API_KEY"),
        ("https_proxy=http://u:hunter2@proxy:3128", "https_proxy"),
        ("export HF_TOKEN=hunter2", "HF_TOKEN"),
        *((line, None) for line in ("https_proxy=http://proxy:3128", "PWD=/a", "OLDPWD=/b", "SSH_AUTH_SOCK=/run/a")),
        *((line, None) for line in ("XAUTHORITY=/c", "A=b@c", "NCCL_IB_PKEY=1", "AWS_SHARED_CREDENTIALS_FILE=/etc/a")),
        ("GOOGLE_APPLICATION_CREDENTIALS=/etc/google.json", None),
    ],
)
def test_secrets_in_the_environment_file_are_rejected_and_nothing_else(tmp_path, hostfile, line, secret):
    (tmp_path / ".deepspeed_env").write_text(f"OMP_NUM_THREADS=1\n{line}\n")
    result = hostfile()
    assert result.returncode == (2 if secret else 0), result.stderr
    assert (f"holds {secret}:" in result.stderr) == bool(secret) and "hunter2" not in result.stderr


def test_an_unknown_launcher_and_a_silent_first_host_are_usage_errors(tmp_path, hostfile):
    result = hostfile(LAUNCHER="pigeon")
    assert result.returncode == 2 and "pdsh or openmpi" in result.stderr
    (tmp_path / "hosts").write_bytes(b"\r\n\t# the first\r\n\ta slots=1 # here\r\n")
    silent = hostfile(programs={"ssh": "exit 255\n"})
    assert silent.returncode == 2 and "no address of a" in silent.stderr


WELCOME = 'echo "Welcome to a"; echo "Last login: 10:02:11 from 10.0.0.9"; '


@pytest.mark.parametrize(
    ("ssh", "environment", "address"),
    [
        (WELCOME + SSH, {}, "10.0.0.1"),
        (WELCOME + SSH, {"INTERFACE": "eth0"}, "10.0.0.1"),
        (WELCOME, {}, None),
        (WELCOME, {"INTERFACE": "eth0"}, None),
        ("echo fe80::1 10.0.0.1\n", {}, "fe80::1"),
        ("echo 2001:db8:0:1::a\n", {}, "2001:db8:0:1::a"),
    ],
)
def test_the_first_hosts_first_address_is_taken_and_not_what_a_login_prints(hostfile, ssh, environment, address):
    result = hostfile(programs={"ssh": ssh}, **environment)
    if address is None:
        assert result.returncode == 2 and "no address of a" in result.stderr and not result.stdout
    else:
        assert f"--master_addr|{address}|" in result.stdout, result.stderr


@pytest.mark.parametrize("given", [{}, {"HOSTS": "hosts"}, {"HOSTS": "others"}])
def test_a_relative_hostfile_is_one_of_where_the_script_is_started(tmp_path, given):
    where = tmp_path / "elsewhere"
    where.mkdir()
    for name in ("hosts", "others"):
        (where / name).write_text("a slots=1\n")
    result = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE, where=where, **given)
    assert f"--hostfile|{where}/{given.get('HOSTS', 'hosts')}|" in result.stdout, result.stderr


def test_the_kubernetes_jobset_ends_on_usage_errors_and_divergence_and_its_pods_find_each_other():
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    (container,) = template["template"]["spec"]["containers"]
    (rule,) = template["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 65] and rule["onExitCodes"]["containerName"] == container["name"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert str(template["completions"]) == str(template["parallelism"]) == environment["PET_NNODES"]
    name = jobset["metadata"]["name"]
    assert environment["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"


def test_lit_goes_over_the_hosts_of_a_hostfile_with_its_brackets_quoted(tmp_path):
    programs = {"python": "true", "ssh": "echo 10.0.0.7", "deepspeed": 'printf "%s\\n" "$@"'}
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    command = ("lit.sh", "--train-data", "x y.tar")
    flags = run(*command, tmp_path=tmp_path, programs=programs, IMAGE="w", HOSTS="hosts").stdout.splitlines()
    assert flags[flags.index("--hostfile") + 1] == str(tmp_path / "hosts") and flags.count("--deepspeed_config") == 1
    brackets = flags[flags.index("--aug-cfg") + 1]
    assert subprocess.run(["bash", "-c", f"printf %s {brackets}"], capture_output=True).stdout == b"scale=(0.08,1.0)"
    programs |= {"python": programs["deepspeed"], "torchrun": "true"}
    alone = run(*command, tmp_path=tmp_path, programs=programs, IMAGE="w").stdout.splitlines()
    assert "scale=(0.08,1.0)" in alone and "x y.tar" in alone and "--hostfile" not in alone
