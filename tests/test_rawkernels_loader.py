"""The loader: what a cubin's key depends on, and a cache that survives crashes, races, damage and read-only folders."""

import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from hqarray.formats import FORMATS
from hqarray.rawkernels import loader, traits

SOURCE = traits.quantize_launch(FORMATS["mxfp8"], None, "bfloat16", True).source
ARCH = "sm_90a"


def has_compiler():
    """Whether cuda-core and an NVRTC package are installed."""
    try:
        return importlib.util.find_spec("cuda.core") is not None and loader.nvrtc_version() != "toolkit"
    except ModuleNotFoundError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no cuda-core and NVRTC: pip install 'hqarray[kernels]'")


@pytest.fixture(autouse=True)
def fresh():
    """What the loader keeps for a process is forgotten around each test."""
    def forget():
        loader._sources_digest.cache_clear()
        loader.nvrtc_version.cache_clear()
        loader._process_folder.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def compiled(monkeypatch):
    """Compilations counted and faked: a list of (source, arch)."""
    calls = []

    def compile_cubin(source, arch):
        calls.append((source, arch))
        return b"\x7fELF" + source.entry.encode() * 100 + bytes([len(calls)]), ""

    monkeypatch.setattr(loader, "compile_cubin", compile_cubin)
    return calls


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """The loader reads a copy of the .cu and .cuh files."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in loader.SOURCES.iterdir():
        if path.suffix in (".cu", ".cuh"):
            shutil.copy(path, folder)
    monkeypatch.setattr(loader, "SOURCES", folder)
    return folder


def cached(path):
    """The cubin in a file of the cache."""
    return path.read_bytes()[: -loader.SEAL_BYTES]


# --- the key ------------------------------------------------------------------------------------


def test_key_is_the_same_for_the_same_inputs(sources):
    key = loader.cubin_key(SOURCE, ARCH)
    loader._sources_digest.cache_clear()
    assert loader.cubin_key(replace(SOURCE), ARCH) == key


@pytest.mark.parametrize("name", sorted(path.name for path in loader.SOURCES.glob("*.cu*")))
def test_key_changes_with_every_source_file(sources, name):
    key = loader.cubin_key(SOURCE, ARCH)
    with open(sources / name, "a") as file:
        file.write("\n")
    loader._sources_digest.cache_clear()
    assert loader.cubin_key(SOURCE, ARCH) != key


def test_key_changes_with_a_new_file_and_with_text_moved_between_files(sources):
    keys = {loader.cubin_key(SOURCE, ARCH)}
    (sources / "new.cuh").write_text("ab")
    (sources / "other.cuh").write_text("c")
    loader._sources_digest.cache_clear()
    keys.add(loader.cubin_key(SOURCE, ARCH))
    (sources / "new.cuh").write_text("a")
    (sources / "other.cuh").write_text("bc")
    loader._sources_digest.cache_clear()
    keys.add(loader.cubin_key(SOURCE, ARCH))
    assert len(keys) == 3


def test_key_changes_with_traits_file_arch_and_compiler(monkeypatch):
    keys = [loader.cubin_key(SOURCE, ARCH), loader.cubin_key(SOURCE, "sm_90"),
            loader.cubin_key(replace(SOURCE, text=SOURCE.text + " "), ARCH),
            loader.cubin_key(replace(SOURCE, file="amax.cu"), ARCH)]
    monkeypatch.setattr(loader, "nvrtc_version", lambda: "nvidia-cuda-nvrtc==99.0")
    keys.append(loader.cubin_key(SOURCE, ARCH))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("option", "value"), [("fma", True), ("ftz", True), ("std", "c++20"), ("lineinfo", True)])
def test_key_changes_with_options(monkeypatch, option, value):
    key = loader.cubin_key(SOURCE, ARCH)
    monkeypatch.setitem(loader.OPTIONS, option, value)
    assert loader.cubin_key(SOURCE, ARCH) != key


def test_nvrtc_version_comes_from_metadata(monkeypatch):
    found = {}

    def version(name):
        if name in found:
            return found[name]
        raise loader.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(loader.importlib.metadata, "version", version)
    for more, expected in [({}, "toolkit"), ({"nvidia-cuda-nvrtc": "13.1"}, "nvidia-cuda-nvrtc==13.1"),
                           ({"nvidia-cuda-nvrtc-cu12": "12.9"},
                            "nvidia-cuda-nvrtc==13.1 nvidia-cuda-nvrtc-cu12==12.9")]:
        found.update(more)
        loader.nvrtc_version.cache_clear()
        assert loader.nvrtc_version() == expected


def test_key_and_a_cache_hit_import_neither_cuda_nor_cupy(compiled, tmp_path):
    path = loader.cubin_path(SOURCE, ARCH, tmp_path)
    code = f"""
import sys
from pathlib import Path
from hqarray.formats import FORMATS
from hqarray.rawkernels import catalogue, loader, traits
source = traits.quantize_launch(FORMATS["mxfp8"], None, "bfloat16", True).source
assert loader.cubin_path(source, {ARCH!r}, Path({str(tmp_path)!r})) == Path({str(path)!r})
loaded = [name for name in sys.modules if name.partition(".")[0] in ("cuda", "cupy", "cupy_backends", "nvmath")]
assert not loaded, loaded
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# --- the cache ----------------------------------------------------------------------------------


def test_cubin_is_compiled_once_and_its_name_says_what_it_is(compiled, tmp_path):
    paths = [loader.cubin_path(SOURCE, ARCH, tmp_path / "a" / "b") for _ in range(2)]
    assert compiled == [(SOURCE, ARCH)]
    assert paths[0] == paths[1]
    assert paths[0].name == f"hq_quantize-{ARCH}-{loader.cubin_key(SOURCE, ARCH)}.cubin"
    assert cached(paths[0]).startswith(b"\x7fELF")
    loader.cubin_path(SOURCE, "sm_80", tmp_path / "a" / "b")
    assert len(compiled) == 2


def test_crash_of_the_compiler_leaves_nothing(monkeypatch, tmp_path):
    def crash(source, arch):
        raise RuntimeError("quantize.cu does not compile")

    monkeypatch.setattr(loader, "compile_cubin", crash)
    with pytest.raises(RuntimeError, match=r"quantize\.cu"):
        loader.cubin_path(SOURCE, ARCH, tmp_path)
    assert not list(tmp_path.iterdir())


def test_crash_while_writing_leaves_nothing(compiled, monkeypatch, tmp_path):
    def interrupt(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(loader.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loader.cubin_path(SOURCE, ARCH, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [
    lambda content: b"", lambda content: content[:100], lambda content: content[:-1],
    lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:], lambda content: content[:-32],
], ids=["empty", "cut", "one byte short", "a bit flipped", "without its digest"])
def test_damaged_cubin_is_compiled_again(compiled, tmp_path, damage):
    path = loader.cubin_path(SOURCE, ARCH, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert loader.cubin_path(SOURCE, ARCH, tmp_path) == path
    assert len(compiled) == 2
    assert loader._is_whole(path)
    assert loader.cubin_path(SOURCE, ARCH, tmp_path) == path
    assert len(compiled) == 2
    assert [path] == list(tmp_path.iterdir())


def test_processes_that_race_leave_one_whole_file(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from hqarray.rawkernels import loader
def compile_cubin(source, arch):
    time.sleep(0.3)
    return b"\\x7fELF" + sys.argv[1].encode() * 4_000_000, ""
loader.compile_cubin = compile_cubin
print(loader.cubin_path(loader.Source("quantize.cu", "hq_quantize", ""), {ARCH!r}, Path({str(tmp_path)!r})).name)
"""
    racers = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, name], stdout=subprocess.PIPE, text=True)
              for name in "abcd"]
    names = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert all(racer.returncode == 0 for racer in racers)
    (path,) = tmp_path.iterdir()
    assert names == {path.name}
    assert loader._is_whole(path)


def test_file_is_never_seen_half_written(compiled, monkeypatch, tmp_path):
    seen = []
    replace_ = os.replace

    def watch(source, target):
        seen.append((Path(target).exists(), loader._is_whole(Path(source)), Path(source).parent == Path(target).parent))
        replace_(source, target)

    monkeypatch.setattr(loader.os, "replace", watch)
    loader.cubin_path(SOURCE, ARCH, tmp_path)
    assert seen == [(False, True, True)]


# --- folders ------------------------------------------------------------------------------------


def test_cache_follows_the_user_s_choice_of_a_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loader.cache_folder() == tmp_path / "hqarray" / "cubins"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setattr(loader.Path, "home", lambda: tmp_path / "home")
        monkeypatch.setattr(loader.sys, "platform", "linux")
        assert loader.cache_folder() == tmp_path / "home" / ".cache" / "hqarray" / "cubins"
    monkeypatch.setattr(loader.sys, "platform", "darwin")
    assert loader.cache_folder() == tmp_path / "home" / "Library" / "Caches" / "hqarray" / "cubins"


def expect_fallback(compiled):
    """cubin_path warns, and gives a whole cubin in a folder of this process, compiled once."""
    with pytest.warns(RuntimeWarning, match="compiled kernels cannot be kept .*XDG_CACHE_HOME"):
        path = loader.cubin_path(SOURCE, ARCH)
    assert loader._is_whole(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.cubin_path(SOURCE, ARCH) == path
    return path


def test_folder_that_cannot_be_made_gives_a_warning_and_a_folder_of_the_process(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    expect_fallback(compiled)
    assert len(compiled) == 1


def test_read_only_folder_gives_a_warning_and_keeps_its_cubins_in_use(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = loader.cubin_path(SOURCE, ARCH)
    make = loader.tempfile.mkstemp

    def mkstemp(suffix, dir):  # root may write anywhere, so permissions prove nothing
        if Path(dir).is_relative_to(tmp_path):
            raise PermissionError(13, "Permission denied", dir)
        return make(suffix=suffix, dir=dir)

    monkeypatch.setattr(loader.tempfile, "mkstemp", mkstemp)
    assert loader.cubin_path(SOURCE, ARCH) == there
    there.unlink()
    assert not expect_fallback(compiled).is_relative_to(tmp_path)
    assert len(compiled) == 2


def test_user_without_a_home_gets_a_folder_of_the_process(compiled, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(loader.Path, "home", no_home)
    expect_fallback(compiled)


# --- the compiler -------------------------------------------------------------------------------


@needs_compiler
def test_edited_header_gives_another_cubin(sources, tmp_path):
    source = traits.amax_launch("bfloat16", True).source
    before = loader.cubin_path(source, ARCH, tmp_path / "cubins")
    header = sources / "codec.cuh"
    assert "INF_BITS = 0x7F800000u" in header.read_text()
    header.write_text(header.read_text().replace("INF_BITS = 0x7F800000u", "INF_BITS = 0x7F000000u"))
    loader._sources_digest.cache_clear()
    after = loader.cubin_path(source, ARCH, tmp_path / "cubins")
    assert after != before
    assert cached(after) != cached(before)
    assert all(cached(path).startswith(b"\x7fELF") for path in (before, after))


@needs_compiler
def test_compile_error_names_the_source_and_the_compiler_s_words():
    words = r"(?s)quantize\.cu does not compile for sm_90a.*nvrtc.*identifier .nonsense."
    with pytest.raises(RuntimeError, match=words):
        loader.compile_cubin(replace(SOURCE, text=SOURCE.text + "constexpr int x = nonsense;\n"), ARCH)


@needs_compiler
def test_report_of_the_assembler_is_read(tmp_path):
    cubin, report = loader.compile_cubin(SOURCE, ARCH)
    used = loader.resources(report)
    assert 16 <= used.registers <= 255
    assert cubin.startswith(b"\x7fELF")
    assert loader.resources("8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\nUsed 40 registers") == (
        loader.Resources(40, 8, 12, 16))
    with pytest.raises(ValueError, match="no resource usage"):
        loader.resources("nothing")


def test_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ImportError, match=r"pip install 'hqarray\[kernels\]'"):
        loader.compile_cubin(SOURCE, ARCH)
