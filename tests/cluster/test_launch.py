"""The launch scripts as far as a shell can tell: what they run, what they reject, when a run is queued again."""

import re
import subprocess

import pytest

from infcl.parallel import read_environment, read_ranks_per_node
from infcl.parallel.environment import NODE_SIZES
from tests.lib.checkout import ROOT
from tests.lib.launch_scripts import run


@pytest.mark.parametrize("path", sorted((ROOT / "launch").iterdir()), ids=lambda path: path.name)
def test_every_script_is_valid_bash_and_says_command_hardware_and_time(path):
    if path.suffix == ".dockerignore":
        return
    if path.suffix in (".sh", ".sbatch"):
        assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    if path.name == "quote.sh":
        return
    if "exec deepspeed" in path.read_text():
        assert re.search(r"deepspeed -q|options=\(-q ", path.read_text()), "DeepSpeed prints its command line again"
    said = dict(re.findall(r"^#   (command|hardware|time) +(\S.*)$", path.read_text(), re.MULTILINE))
    assert re.match(r"(\S+=\S+ )*(bash|sbatch|make|kubectl|docker) ", said["command"])
    assert re.search("GPU|any|as the run", said["hardware"])
    assert re.match("as long as the training|.*(second|minute)", said["time"])


def test_quoted_words_come_out_of_a_shell_as_they_went_in():
    words = ["plain-1.0/x=y", "", "a b", "{0..3}", "$(id) `id` $HOME", 'it\'s "so"', "; & | > <", "%h *?[a]", "é\\n\t"]
    script = (
        'source launch/quote.sh; line=; for w in "$@"; do line+=" $(quote "$w")"; done; eval "printf \'%s\\0\' $line"'
    )
    printed = subprocess.run(["bash", "-c", script, "-", *words], cwd=ROOT, capture_output=True, check=True).stdout
    assert printed.decode().split("\0")[:-1] == words


SLURM = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
FLAGS = ["--logs", "logs", "--name", "first"]


def slurm(tmp_path, srun: str, *arguments, **environment: str):
    scontrol = 'case $1 in show) echo n1; echo n2;; *) echo "scontrol $*";; esac\n'
    programs = {"srun": srun, "scontrol": scontrol}
    return run("slurm.sbatch", *arguments, tmp_path=tmp_path, programs=programs, **SLURM | environment)


SAVES = 'mkdir -p logs/first/checkpoints; echo "step_$SLURM_RESTART_COUNT" > logs/first/checkpoints/latest; '


@pytest.mark.parametrize("code", [138, 143, 1, 137])
def test_slurm_queues_a_run_with_a_new_checkpoint_again_however_often_it_did(tmp_path, code):
    """A long run is queued again at every time limit: those are no failures."""
    for restart in (0, 1, 50):
        result = slurm(tmp_path, f"{SAVES} exit {code}\n", *FLAGS, SLURM_RESTART_COUNT=str(restart))
        assert result.returncode == 0 and "scontrol requeue 7" in result.stdout, result.stdout + result.stderr
        assert f"exit code {code} after step_{restart}; queued again\n" in result.stdout


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


@pytest.mark.parametrize("code", [0, 2, 65, 130])
def test_slurm_does_not_queue_a_usage_error_again_nor_what_trains_nothing(tmp_path, code):
    result = slurm(tmp_path, f"{SAVES} exit {code}\n", *FLAGS)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_slurm_gives_up_where_failures_cannot_be_counted(tmp_path):
    """A full disk, say: it would be the first failure each time."""
    (tmp_path / "logs" / "first.failures").mkdir(parents=True)
    result = slurm(tmp_path, "exit 1\n", *FLAGS)
    assert result.returncode == 1 and "requeue" not in result.stdout, result.stdout
    nested = slurm(tmp_path, "exit 1\n", "--logs", "logs", "--name", "a/b")
    assert "restart 1 of 10" in nested.stdout and (tmp_path / "logs" / "a" / "b.failures").read_text() == "7 1\n"


def test_slurm_does_not_queue_a_finished_run_again(tmp_path):
    (tmp_path / "logs" / "first").mkdir(parents=True)
    result = slurm(tmp_path, 'touch logs/first/summary.json; echo "$MASTER_ADDR $*"; exit 138\n', *FLAGS, "--wd", "a b")
    assert result.returncode == 0 and "requeue" not in result.stdout
    assert result.stdout.startswith("n1 --kill-on-bad-exit=0 --wait=300 python -u pretrain_clip.py --deepspeed_config")
    assert "--resume latest --logs logs --name first --wd a b" in result.stdout


STEP = """
if [ "$1 $2 $3" != "--kill-on-bad-exit=0 --wait=300 --cpus-per-task=12" ]; then exit 3; fi
for node in 0 1; do
  for task in 0 1; do
    export SLURM_PROCID=$((2 * node + task)) SLURM_LOCALID=$task SLURM_NTASKS=4 SLURM_TASKS_PER_NODE="2(x2)"
    "${@:4}"
    code=$?
  done
done
exit $code
"""  # as srun starts a step of two nodes with two tasks each, one after another

IP = """
[ "$*" = "-o addr show dev ib0 scope global" ] || exit 1
echo "3: ib0    inet6 fd00::7/64 scope global \\       valid_lft forever preferred_lft forever"
echo "3: ib0    inet 10.9.0.7/24 brd 10.9.0.255 scope global ib0\\       valid_lft forever preferred_lft forever"
"""


@pytest.mark.parametrize(("interface", "address"), [("", "n1"), ("ib0", "10.9.0.7")])
def test_each_slurm_task_gets_its_rank_its_cores_and_the_first_nodes_address(tmp_path, monkeypatch, interface, address):
    """What the trainer reads of the environment in which the tasks of two nodes start.

    A node's name may be an address of another network than INTERFACE, which the rendezvous rejects.
    """
    exact = f"={interface}" if interface else ""
    python = 'env > "task-$SLURM_PROCID"; echo "$*" >> words; exit 1\n'
    scontrol = 'case "$*" in "show hostnames n[1-2]") echo n1; echo n2;; *) echo "scontrol $*";; esac\n'
    programs = {"srun": STEP, "scontrol": scontrol, "python": python, "ip": IP}
    given = SLURM | {"SLURM_JOB_ID": "123456", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "12"}
    given |= {"INTERFACE": interface} if interface else {}
    result = run("slurm.sbatch", *FLAGS, "--wd", "a b", tmp_path=tmp_path, programs=programs, **given)
    assert "scontrol requeue 123456" in result.stdout, result.stderr  # nothing has been trained
    words = (tmp_path / "words").read_text().splitlines()
    assert len(words) == 4 and set(words) == {
        "-u pretrain_clip.py --deepspeed_config ds_configs/zero1.json --resume latest --logs logs --name first --wd a b"
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", *NODE_SIZES):
        monkeypatch.delenv(name, raising=False)
    for rank in range(4):
        task = dict(line.split("=", 1) for line in (tmp_path / f"task-{rank}").read_text().splitlines() if "=" in line)
        assert (task["MASTER_ADDR"], task["MASTER_PORT"]) == (address, "13456")
        assert (task.get("NCCL_SOCKET_IFNAME", ""), task.get("GLOO_SOCKET_IFNAME", "")) == (exact, interface)
        for name, value in task.items():
            if name.startswith("SLURM_"):
                monkeypatch.setenv(name, value)
        assert read_environment() == (rank, 4, rank % 2) and read_ranks_per_node() == 2


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("i.sqsh", "--container-image=i.sqsh --container-mounts={0}:{0},/a:/a,/b:/b --container-workdir={0} python -u"),
        ("i.sif", "apptainer exec --nv --bind {0}:{0},/a:/a,/b:/b --pwd {0} i.sif python -u"),
    ],
)
def test_slurm_runs_each_task_in_a_container(tmp_path, image, words):
    result = slurm(tmp_path, 'echo "$*"; exit 2\n', *FLAGS, CONTAINER=image, CONTAINER_MOUNTS="/a,/b")
    assert f"--wait=300 {words.format(tmp_path)} pretrain_clip.py" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logs", "logs"], "--logs and --name are missing"),
        ([*FLAGS, "--overwrite"], "from scratch after each requeue"),
    ],
)
def test_slurm_starts_nothing_after_a_usage_error(tmp_path, flags, message):
    programs = {"srun": "echo started\n", "scontrol": "echo n1\n", "ip": IP}
    result = run("slurm.sbatch", *flags, tmp_path=tmp_path, programs=programs, **SLURM)
    assert (result.returncode, result.stdout) == (2, "") and message in result.stderr


@pytest.mark.parametrize("form", [["--logs=logs", "--name=first"], ["--name", "x", *FLAGS]])
def test_slurm_reads_the_folder_as_the_program_does(tmp_path, form):
    (tmp_path / "logs" / "first").mkdir(parents=True)
    assert slurm(tmp_path, "touch logs/first/summary.json; exit 1\n", *form).returncode == 0


SSH = 'case "$*" in *hostname*) echo "10.0.0.1 fe80::1 ";; *) echo "2: eth0    inet 10.0.0.1/24 brd";; esac\n'
HOSTFILE = {"python": "exit 0\n", "ssh": SSH, "deepspeed": 'printf "%s|" "$@"\n'}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("WANDB_API_KEY=hunter2", "WANDB_API_KEY"),
        ("https_proxy=http://u:hunter2@proxy:3128", "https_proxy"),
        ("PGPASSWD=hunter2", "PGPASSWD"),
        ("AWS_CREDENTIALS=hunter2", "AWS_CREDENTIALS"),
        ("export HF_TOKEN=hunter2", "HF_TOKEN"),
    ],
)
def test_every_kind_of_secret_in_the_environment_file_is_rejected(tmp_path, line, name):
    (tmp_path / "hosts").write_text("a slots=1\n")
    (tmp_path / ".deepspeed_env").write_text(f"OMP_NUM_THREADS=1\n{line}\n")
    result = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE)
    assert result.returncode == 2 and f"holds {name}:" in result.stderr and "hunter2" not in result.stderr


def test_what_is_no_secret_in_the_environment_file_is_passed_on(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\n")
    lines = ["https_proxy=http://proxy:3128", "PWD=/a", "OLDPWD=/b", "SSH_AUTH_SOCK=/run/a", "XAUTHORITY=/c", "A=b@c"]
    lines += ["GOOGLE_APPLICATION_CREDENTIALS=/etc/google.json", "NCCL_IB_PKEY=1", "AWS_SHARED_CREDENTIALS_FILE=/etc/a"]
    (tmp_path / ".deepspeed_env").write_text("\n".join(lines))
    result = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_the_launchers_get_address_interface_and_flags(tmp_path, launcher):
    (tmp_path / "hosts").write_text("a slots=1\n")
    settings = {"LAUNCHER": launcher, "INTERFACE": "eth0", "PORT": "29999"}
    programs = HOSTFILE | {"deepspeed": HOSTFILE["deepspeed"] + 'echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"\n'}
    result = run("hostfile.sh", "--wd", "0.1", tmp_path=tmp_path, programs=programs, **settings)
    assert result.stdout.endswith("=eth0 eth0\n")
    assert launcher == "pdsh" or "-x NCCL_SOCKET_IFNAME -x GLOO_SOCKET_IFNAME" in result.stdout
    assert result.returncode == 0, result.stderr
    assert (
        f"--master_addr|10.0.0.1|--master_port|29999|--force_multi|--no_ssh_check|--launcher|{launcher}|"
        in result.stdout
    )
    assert "pretrain_clip.py|--deepspeed_config|ds_configs/zero1.json|--wd|0.1|" in result.stdout


def test_an_unknown_launcher_and_a_silent_first_host_are_usage_errors(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\n")
    result = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE, LAUNCHER="pigeon")
    assert result.returncode == 2 and "pdsh or openmpi" in result.stderr
    (tmp_path / "hosts").write_bytes(b"\r\n\t# the first\r\n\ta slots=1 # here\r\n")
    silent = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE | {"ssh": "exit 255\n"})
    assert silent.returncode == 2 and "no address of a" in silent.stderr


WELCOME = 'echo "Welcome to a"; echo "Last login: 10:02:11 from 10.0.0.9"; '


@pytest.mark.parametrize("interface", [{}, {"INTERFACE": "eth0"}])
def test_what_a_login_prints_is_not_taken_for_the_first_hosts_address(tmp_path, interface):
    (tmp_path / "hosts").write_text("a slots=1\n")
    greeted = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE | {"ssh": WELCOME + SSH}, **interface)
    assert "--master_addr|10.0.0.1|" in greeted.stdout, greeted.stderr
    only = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE | {"ssh": WELCOME}, **interface)
    assert only.returncode == 2 and "no address of a" in only.stderr and not only.stdout


@pytest.mark.parametrize(
    ("printed", "address"), [("fe80::1 10.0.0.1", "fe80::1"), ("2001:db8:0:1::a", "2001:db8:0:1::a")]
)
def test_the_first_of_a_hosts_addresses_is_taken_of_either_kind(tmp_path, printed, address):
    (tmp_path / "hosts").write_text("a slots=1\n")
    result = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE | {"ssh": f"echo {printed}\n"})
    assert f"--master_addr|{address}|" in result.stdout, result.stderr


def test_a_relative_hostfile_is_one_of_where_the_script_is_started(tmp_path):
    where = tmp_path / "elsewhere"
    where.mkdir()
    for name in ("hosts", "others"):
        (where / name).write_text("a slots=1\n")
    for given in ({}, {"HOSTS": "hosts"}, {"HOSTS": "others"}):
        result = run("hostfile.sh", tmp_path=tmp_path, programs=HOSTFILE, where=where, **given)
        assert f"--hostfile|{where}/{given.get('HOSTS', 'hosts')}|" in result.stdout, result.stderr
    lit = {"IMAGE": "w", "HOSTS": "others"}
    result = run("lit.sh", tmp_path=tmp_path, programs=HOSTFILE, where=where, **lit)
    assert f"--hostfile|{where}/others|" in result.stdout and f"--pretrained-image|{where}/w|" in result.stdout


# The fields of jobset.x-k8s.io/v1alpha2 and batch/v1 in launch/kubernetes.yaml, since no cluster is here to ask.
JOBSET = set(
    """apiVersion kind metadata name spec failurePolicy maxRestarts rules action onJobFailureReasons replicatedJobs
    replicas template completions parallelism completionMode backoffLimit podFailurePolicy onExitCodes containerName
    operator values restartPolicy terminationGracePeriodSeconds containers image command args env value valueFrom
    fieldRef fieldPath resources limits nvidia.com/gpu rdma/hca securityContext runAsUser capabilities add volumeMounts
    mountPath volumes persistentVolumeClaim claimName emptyDir medium""".split()
)


def fields_of(found) -> set[str]:
    """Return the names of all fields, at any depth."""
    if isinstance(found, dict):
        return set(found).union(*map(fields_of, found.values()))
    return set().union(*map(fields_of, found)) if isinstance(found, list) else set()


def test_the_kubernetes_jobset_has_known_fields_and_ends_on_usage_errors_and_divergence():
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    assert fields_of(jobset) - JOBSET == set()
    (job,) = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    assert template["completionMode"] == "Indexed"  # JobSet names pods by their index
    assert template["template"]["spec"]["restartPolicy"] == "Never"  # a Job with a podFailurePolicy takes no other
    (container,) = template["template"]["spec"]["containers"]
    (rule,) = template["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 65] and rule["onExitCodes"]["containerName"] == container["name"]
    assert jobset["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert str(template["completions"]) == str(template["parallelism"]) == environment["PET_NNODES"]
    name = jobset["metadata"]["name"]
    assert environment["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    volumes = {one["name"] for one in template["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    from torch.distributed.run import parse_args

    read = parse_args(container["args"])
    assert container["command"] == ["python", "-m", "infcl.cluster.torchrun"]
    assert read.training_script == "pretrain_clip.py"
    assert "--logs=/data/logs" in read.training_script_args


def test_the_image_has_what_the_launch_scripts_call():
    """The base image has bash, awk, grep, sed and hostname; packages are Ubuntu's."""
    image = (ROOT / "launch" / "Dockerfile").read_text()
    assert re.search(r"^FROM \S+:\d+\.\d+\.\d+-devel-\S+$", image, re.MULTILINE)  # nvcc, and a version that stays
    called = "\n".join(path.read_text() for path in (ROOT / "launch").glob("*.s*"))
    packages = {"ssh": "openssh-client", "ip": "iproute2", "pdsh": "pdsh", "git": "git", "python": "python3-venv"}
    for program, package in packages.items():
        assert package in image.split() and (program == "git" or re.search(rf"\b{program}\b", called))
    for source in re.findall(r"^COPY (?:--\S+ )?(\S+)", image, re.MULTILINE):
        assert (ROOT / source).exists()


def test_lit_goes_over_the_hosts_of_a_hostfile_with_its_brackets_quoted(tmp_path):
    programs = {"python": "true", "ssh": "echo 10.0.0.7", "deepspeed": 'printf "%s\\n" "$@"'}
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    command = ("lit.sh", "--train-data", "x y.tar")
    flags = run(*command, tmp_path=tmp_path, programs=programs, IMAGE="w", HOSTS="hosts").stdout.splitlines()
    assert flags[flags.index("--hostfile") + 1] == str(tmp_path / "hosts") and flags.count("--deepspeed_config") == 1
    brackets = flags[flags.index("--aug-cfg") + 1]
    assert subprocess.run(["bash", "-c", f"printf %s {brackets}"], capture_output=True).stdout == b"scale=(0.08,1.0)"
    alone = run(*command, tmp_path=tmp_path, programs=programs, IMAGE="w").stdout.splitlines()
    assert "scale=(0.08,1.0)" in alone and "x y.tar" in alone and "--hostfile" not in alone
