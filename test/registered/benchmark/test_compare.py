"""compare.py on hand-made results: which measure judges, what fails, what is only listed."""

import json

import compare
import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def denoise_row(arm, ms, eager, floor, **changes):
    size = {"width": 1024, "height": 1024, "num_gpus": 1, "layout": "single"}
    return {
        "model": "m",
        "arm": arm,
        **size,
        "ms_per_step": ms,
        "ratio_to_eager": ms / eager if eager else None,
        "ratio_to_floor": ms / floor if floor else None,
        **changes,
    }


def generate_row(arm, wall, **changes):
    row = {"model": "m", "arm": arm, "prompt": "p", "wall_s": wall, "denoise_s": wall - 1}
    return row | changes


def kernel_row(eager_us, fused_us, pct_copy, **changes):
    row = {"op": "o", "shape": [1, 8], "dtype": "bfloat16", "eager_us": eager_us}
    return row | {"fused_us": fused_us, "pct_copy": pct_copy} | changes


@pytest.fixture
def run(tmp_path, capsys):
    """Compares two lists of rows as files of a kind -> (exit code, what was printed)."""

    def compare_rows(kind, old, new, *flags):
        paths = []
        for side, rows in (("old", old), ("new", new)):
            paths.append(tmp_path / side / f"{kind}.json")
            paths[-1].parent.mkdir(exist_ok=True)
            paths[-1].write_text(json.dumps({"header": {}, "rows": rows}))
        code = compare.main([*map(str, paths), *flags])
        return code, capsys.readouterr().out

    return compare_rows


def test_a_slower_machine_is_no_regression(run):
    old = [denoise_row("eager", 100, 100, 50), denoise_row("lossless", 70, 100, 50)]
    new = [denoise_row("eager", 110, 110, 55), denoise_row("lossless", 77, 110, 55)]
    code, out = run("denoise", old, new)
    assert code == 0
    assert "| m lossless 1024 1024 1 single | ms_per_step | / eager | 0.7000 | 0.7000 |" in out


def test_a_row_that_lost_against_eager_and_floor_fails(run):
    old = [denoise_row("eager", 100, 100, 50), denoise_row("lossless", 70, 100, 50)]
    new = [denoise_row("eager", 100, 100, 50), denoise_row("lossless", 72, 100, 50)]
    code, out = run("denoise", old, new)
    assert code == 1
    assert "+2.86 % | WORSE" in out and "1 worse by more than 2 %" in out
    assert run("denoise", old, new, "--tolerance", "3")[0] == 0


def test_a_faster_eager_arm_is_no_regression_of_the_others(run):
    old = [denoise_row("eager", 100, 100, 50), denoise_row("lossless", 70, 100, 50)]
    new = [denoise_row("eager", 80, 80, 50), denoise_row("lossless", 70, 80, 50)]
    assert run("denoise", old, new)[0] == 0


def test_the_time_itself_judges_where_there_is_no_ratio(run):
    old, new = [denoise_row("lossless", 70, None, None)], [denoise_row("lossless", 75, 100, 50)]
    code, out = run("denoise", old, new)
    assert code == 1 and "| time | 70.0000 | 75.0000 |" in out


def test_exactly_the_tolerance_is_allowed(run):
    old, new = [denoise_row("lossless", 50, None, None)], [denoise_row("lossless", 51, None, None)]
    assert run("denoise", old, new)[0] == 0


def test_yardsticks_are_shown_and_never_fail(run):
    old = [denoise_row("eager", 100, 100, 50), denoise_row("diffusers", 100, 100, 50)]
    new = [denoise_row("eager", 150, 150, 50), denoise_row("diffusers", 200, 100, 50)]
    code, out = run("denoise", old, new)
    assert code == 0 and out.count("yardstick") == 3  # eager has no ratio to itself


def test_rows_that_new_lacks_are_listed(run):
    old = [denoise_row("lossless", 70, 100, 50), denoise_row("high", 69, 100, 50)]
    code, out = run("denoise", old, old[:1])
    assert code == 0
    assert "missing in NEW: denoise.json: m high 1024 1024 1 single" in out
    assert "1 rows missing" in out


def test_other_layouts_of_one_size_are_other_rows(run):
    old = [denoise_row("lossless", 70, 100, 50)]
    code, out = run("denoise", old, [denoise_row("lossless", 40, 100, 50, num_gpus=2)])
    assert code == 0 and "0 quantities compared" in out and "1 rows missing" in out


def test_a_row_of_an_older_version_fits_by_the_fields_it_has(run):
    old = [generate_row("lossless", 10.0)]
    code, out = run("generate", old, [generate_row("lossless", 12.0, width=1024, height=1024)])
    assert code == 1 and "0 rows missing" in out


def test_generate_is_judged_against_the_eager_arm_of_its_prompt(run):
    old = [generate_row("eager", 20.0), generate_row("lossless", 10.0, ar_s=4.0)]
    slow = [generate_row("eager", 22.0), generate_row("lossless", 11.0, ar_s=4.4)]
    code, out = run("generate", old, slow)
    assert code == 1  # the eager arm has no prior to compare with: the time itself judges
    assert "| m lossless p | wall_s | / eager | 0.5000 | 0.5000 | +0.00 % | ok |" in out
    assert "| m lossless p | ar_s | time | 4.0000 | 4.4000 | +10.00 % | WORSE |" in out


def test_kernels_are_worse_only_against_eager_and_copy(run):
    old = [kernel_row(100, 20, 80)]
    assert run("kernels", old, [kernel_row(110, 22, 73)])[0] == 0
    assert run("kernels", old, [kernel_row(100, 21, 81)])[0] == 0
    assert run("kernels", old, [kernel_row(100, 22, 73)])[0] == 1
    assert run("kernels", old, [kernel_row(100, 22, None)])[0] == 1


def test_rows_of_one_name_pair_up_in_order(run):
    old = [kernel_row(100, 20, None), kernel_row(100, 50, None)]
    assert run("kernels", old, old)[0] == 0
    code, out = run("kernels", old, old[:1])
    assert code == 0 and "1 rows missing" in out


def test_folders_compare_every_file_that_old_has(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        rows = {"rows": [kernel_row(100, 20, 80)]}
        (folder / "kernels.json").write_text(json.dumps(rows))
    (old / "kernel_tests.json").write_text("{}")
    (old / "denoise.json").write_text(json.dumps({"rows": [denoise_row("high", 1, 1, 1)]}))
    assert compare.main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "1 quantities compared" in out and "missing in NEW: denoise.json: m high" in out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path / "no.json", "exists"),
        (lambda path: path, "two files or two folders"),
        (lambda path: path / "other.json", "begins with one of"),
        (lambda path: path / "kernels_list.json", "JSON object with rows"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, make, said, capsys):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "kernels_list.json").write_text("[]")
    with pytest.raises(SystemExit):
        compare.main([str(make(tmp_path)), str(tmp_path / "other.json")])
    assert said in capsys.readouterr().err


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), str(tmp_path)])
    assert "a folder with one of denoise" in capsys.readouterr().err
