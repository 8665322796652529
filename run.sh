#!/usr/bin/env bash
# Sets up .venv if needed, then runs:  ./run.sh [verb] [...]      the verbs: ./run.sh --help
#                                      ./run.sh test [...]        the tests, or those that pytest's arguments name
#                                      ./run.sh test --all        and those that take long: clusters, wheels, long fuzz
# The set-up is redone only when requirements.lock changes, the Python of .venv changes, or a GPU appears beside a CPU
# build of torch.  To start over: rm -rf .venv.  Settings, all optional:
#   SPEEDRUN_PYTHON=python3        run with this Python and the packages it has; make no .venv
#   SPEEDRUN_BOOTSTRAP_PYTHON=...  make .venv with this Python
#   SPEEDRUN_TORCH=cpu or cuda     the build of torch, instead of the one for this machine
#   SPEEDRUN_TORCH_INDEX=...       where the CPU build is looked for when pip's own index lacks it
set -euo pipefail
unset CDPATH
unset PYTHONSAFEPATH # the program is started in the folder that it is imported from
unset PYTHONINSPECT # which would turn each exit code into a traceback
export PYTHONUTF8=1 # files are UTF-8, whatever the locale
export SPEEDRUN_TYPED="${SPEEDRUN_TYPED:-$0}" # what messages call this file outside of its folder
export SPEEDRUN_CWD="$PWD" # the program resolves the user's relative paths against this
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" # a link to this file works from anywhere

CPU_GIB=3 # .venv takes 1.4 GiB, pip's downloads 0.3 GiB, the rest is slack
CUDA_GIB=8

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { say "$*" && exit 2; }

# ---- is .venv what the lock file asks for?  No Python is started: this runs before every command. --------------------

stamp() { # torch build -> the words that .venv/stamp holds when .venv is complete
    printf 'lock %s, python %s, torch %s' "$(cksum <requirements.lock)" "$(readlink -f .venv/bin/python)" "$1"
}

is_current() {
    [ -x .venv/bin/python ] && [ -f .venv/stamp ] && [ ! -e .venv/incomplete ] || return 1
    local build=cuda has
    has=$(<.venv/stamp)
    case "$has" in *", torch cpu") build=cpu ;; esac
    [ "$has" = "$(stamp $build)" ] || return 1
    case "${SPEEDRUN_TORCH:-}" in
        "") [ $build = cuda ] || ! has_gpu_device ;; # the CUDA build serves without a GPU as well
        *) [ $build = "$SPEEDRUN_TORCH" ] ;;
    esac
}

has_gpu_device() { [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ]; }

wanted_build() {
    case "${SPEEDRUN_TORCH:-}" in
        cpu | cuda) echo "$SPEEDRUN_TORCH" ;;
        "") if has_gpu_device || nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) die "SPEEDRUN_TORCH=$SPEEDRUN_TORCH: say cpu or cuda, or leave it unset." ;;
    esac
}

# ---- which Python ----------------------------------------------------------------------------------------------------

PROBE='
import sys
words = "Python %d.%d.%d" % tuple(sys.version_info[:3])
if not (3, 11) <= tuple(sys.version_info[:2]) <= (3, 13):
    print(words)
    sys.exit()
try:
    import venv, ensurepip
    print("fit: " + words)
except ImportError as error:
    print(words + " without " + error.name)'

as_typed() { # a program as the user named it, from the folder they were in
    case "$1" in /*) echo "$1" ;; */*) echo "$SPEEDRUN_CWD/$1" ;; *) echo "$1" ;; esac
}

choose_python() { # sets BOOTSTRAP and BOOTSTRAP_WORDS
    local python words found="" candidates="python3 python3.12 python3.13 python3.11 python"
    [ -z "${SPEEDRUN_BOOTSTRAP_PYTHON:-}" ] || candidates=SPEEDRUN_BOOTSTRAP_PYTHON
    for python in $candidates; do
        [ "$python" != SPEEDRUN_BOOTSTRAP_PYTHON ] || python=$(as_typed "$SPEEDRUN_BOOTSTRAP_PYTHON")
        words=$("$python" -c "$PROBE" 2>/dev/null) || words="${words:-}"
        case "$words" in
            fit:*) BOOTSTRAP=$python BOOTSTRAP_WORDS=${words#fit: } && return ;;
            ?*) found="$found${found:+, }$python is $words" ;;
            *) [ -z "${SPEEDRUN_BOOTSTRAP_PYTHON:-}" ] || found="$python does not run" ;;
        esac
    done
    die "this needs Python 3.11, 3.12 or 3.13 with venv and pip, but ${found:-there is none}: install one" \
        "(Debian, Ubuntu: apt install python3-venv) or name one with SPEEDRUN_BOOTSTRAP_PYTHON=/path/to/python3.12."
}

venv_is_usable() {
    [ ! -e .venv/incomplete ] && .venv/bin/python -c '
import sys, pip
sys.exit(sys.prefix == sys.base_prefix or not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# ---- installing ------------------------------------------------------------------------------------------------------

LOCK='
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("set-up: waiting for another set-up of this folder", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # a file system without locks'

set_up() {
    if ! { mkdir -p .venv && : >>.venv/lock; } 2>/dev/null; then
        die "cannot write to $PWD/.venv: make it writable, or use a Python that has it all: SPEEDRUN_PYTHON=python3."
    fi
    local locker=.venv/bin/python
    venv_is_usable || { choose_python && locker=$BOOTSTRAP; }
    exec 9>>.venv/lock # the lock is this shell's, until it closes the file or dies
    "$locker" -c "$LOCK"
    is_current || build_venv
    exec 9>&-
}

build_venv() {
    trap 'say "interrupted; the next call starts over."; exit 130' INT TERM
    local build
    build=$(wanted_build)
    if [ -f .venv/stamp ]; then
        say "the pins or this machine changed; updating .venv"
    elif [ "$build" = cuda ]; then
        need_gib $CUDA_GIB
    else
        need_gib $CPU_GIB
    fi
    if venv_is_usable; then
        [ -f .venv/stamp ] || say "completing .venv"
    else
        choose_python
        say "making .venv with $BOOTSTRAP_WORDS"
        : >.venv/incomplete # until the end: a set-up that is killed is not trusted but made anew
        find .venv/ -mindepth 1 -maxdepth 1 ! -name lock ! -name incomplete -exec rm -rf {} +
        "$BOOTSTRAP" -m venv .venv >.venv/log 2>&1 || fail "$BOOTSTRAP -m venv .venv"
    fi
    : >.venv/incomplete
    install_pins "$build" || fail "pip"
    for packages in .venv/lib/python3*/site-packages; do
        [ ! -d "$packages" ] || echo "$PWD/bench/api/importable" >"$packages/speedrun.pth" # import speedrun
    done
    stamp "$BUILD" >.venv/stamp.new
    rm .venv/incomplete
    mv .venv/stamp.new .venv/stamp # last: the stamp alone means done
    say "done"
    trap - INT TERM
}

need_gib() {
    local free_kib
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "${free_kib:-0}" -ge $(($1 * 1024 * 1024)) ] ||
        die "$((${free_kib:-0} / 1024)) MiB are free on the disk of $PWD, and the set-up needs $1 GiB: free some space."
}

install_pins() { # sets BUILD, the build of torch that was installed
    local version index=${SPEEDRUN_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.lock)
    BUILD=$1
    if [ "$BUILD" = cuda ]; then
        say "installing torch $version (CUDA build) and the other pins: some minutes and 5 GiB, once"
        pip_install && return
        return 1
    fi
    say "installing torch $version (CPU build) and the other pins: about a minute, once"
    pip_install && return
    index_lacks_cpu_build || return 1
    say "pip's index has no CPU build of torch; asking $index"
    PIP_RETRIES=1 pip_install --extra-index-url "$index" && return
    index_lacks_cpu_build && [ -z "${SPEEDRUN_TORCH:-}" ] || return 1
    say "no CPU build of torch for this Python can be reached; taking the CUDA build, which runs here too: 5 GiB"
    need_gib $CUDA_GIB
    BUILD=cuda
    pip_install
}

pip_install() { # the pins for BUILD, by their hashes, with more of pip's arguments
    local pins=.venv/pins.txt
    if [ "$BUILD" = cuda ]; then # === does not take 2.13.0+cpu for 2.13.0
        sed 's/^torch==/torch===/' requirements.lock
    else # the CPU build bears a +cpu on Linux alone
        sed -e '/^# CUDA build/,$d' -e "$([ "$(uname -s)" != Linux ] || echo 's/^torch==[0-9.]*/&+cpu/')" requirements.lock
    fi >$pins
    # two of the packages have no wheel: the pinned setuptools builds them, which is there first
    sed -n '/^setuptools==/,/[^\\]$/p' $pins >.venv/build-pins.txt
    pip_install_file .venv/build-pins.txt && pip_install_file $pins "$@"
}

pip_install_file() {
    local file=$1
    shift
    PIP_USER=0 PIP_CONSTRAINT='' .venv/bin/python -m pip install "$@" --require-hashes --no-deps --no-build-isolation \
        -r "$file" --no-input --progress-bar off --disable-pip-version-check </dev/null >.venv/log 2>&1
}

index_lacks_cpu_build() { # the index answered: it has versions of torch, but not this one
    grep -q 'requirement torch==[0-9.]*+cpu (from versions: [0-9]' .venv/log
}

fail() { # which program failed; .venv/log holds what it said
    { grep -i '^ *error' .venv/log || cat .venv/log; } | tail -n 6 | cut -c 1-200 | sed 's/^/    /' >&2
    [ "$1" != pip ] || rm -f .venv/incomplete # pip undoes what it could not finish
    if grep -qiE 'no space left|disk quota exceeded' .venv/log; then
        die "the disk is full: free $CPU_GIB GiB ($CUDA_GIB for CUDA) for $PWD and ${TMPDIR:-/tmp}, then try again."
    elif grep -qE 'NewConnection|NameResolution|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Reset' .venv/log &&
        grep -qE 'No matching distribution|Max retries|Read timed out' .venv/log; then
        die "the package index cannot be reached: check the network and 'pip config list', then try again."
    elif grep -q 'No matching distribution' .venv/log; then
        die "$(sed -n 's/.*No matching distribution/pip: no matching distribution/p' .venv/log | head -n 1), on" \
            "$(uname -sm) with $(.venv/bin/python -V): try another Python with SPEEDRUN_BOOTSTRAP_PYTHON," \
            "or another index in pip's configuration."
    fi
    die "$1 failed: its last lines are above, all of them in $PWD/.venv/log."
}

# ---- an environment of the user's own --------------------------------------------------------------------------------

CHECK='
import sys
python, verb = sys.argv[1:]
if not (3, 11) <= tuple(sys.version_info[:2]) <= (3, 13):
    sys.exit("set-up: SPEEDRUN_PYTHON=%s is Python %d.%d; use 3.11, 3.12 or 3.13." % ((python,) + sys.version_info[:2]))
import importlib.metadata, re, shlex, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
wanted = extras["cpu"] + project["dependencies"] + (extras["test"] if verb in ("test", "lint") else [])
def numbers(version):
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
def fits(found, sign, bound):
    return (numbers(found) >= numbers(bound)) == (sign == ">=")
wrong = {}  # requirement: what there is instead
for requirement in wanted:
    name, bounds = re.match(r"([\w-]+)(.*)", requirement).groups()
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        wrong[requirement] = "no " + name
        continue
    if not all(fits(found, *bound) for bound in re.findall(r"(>=|<)([\d.]+)", bounds)):
        wrong[requirement] = name + " " + found
if wrong:
    sys.exit("set-up: SPEEDRUN_PYTHON=%s has %s; try: %s -m pip install %s" % (
        python, ", ".join(wrong.values()), shlex.quote(python), shlex.join(wrong)))'

# ----------------------------------------------------------------------------------------------------------------------

if [ -n "${SPEEDRUN_PYTHON:-}" ]; then
    python=$(as_typed "$SPEEDRUN_PYTHON")
    command -v "$python" >/dev/null || die "SPEEDRUN_PYTHON=$SPEEDRUN_PYTHON: no such program; name a Python 3.11-3.13."
    "$python" -c "$CHECK" "$SPEEDRUN_PYTHON" "${1:-}" || exit 2
else
    is_current || set_up
    python=$PWD/.venv/bin/python
fi
if [ "${1:-}" = test ]; then
    unset SPEEDRUN_TYPED # of this call, not of those that the tests make
    shift
    exec "$python" -m pytest -n auto --dist loadfile "$@" # how many processes: tests/conftest.py
elif [ "${1:-}" = lint ]; then
    "$python" -m ruff check . && "$python" -m ruff format --check . && exec "$python" -m mypy
    exit 1
fi
exec "$python" -m bench "$@"
