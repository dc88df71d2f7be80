"""The viewer in a real browser: clicks, sliders, tabs, two sessions, a closed browser, and what is served to whom."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trajectory_transformer import ModelConfig, SearchConfig, TokenConfig, TrainConfig, collect, train
from trajectory_transformer.data.episode import Dataset, Dimension, save_npz

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ATTACK = "<img src=x onerror=document.title='attacked'>"
SEARCH = SearchConfig(beam_width=8, horizon=3, context=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reaches goals in one of the four rooms; the names of its data are hostile."""
    folder = tmp_path_factory.mktemp("browser")
    dataset = collect("tt/FourRooms-v0", "demonstrator", episodes=600)
    named = Dataset(dataset.episodes, dataset.metadata, (Dimension(ATTACK), Dimension("$$x^2$$")))
    save_npz(named, folder / "rooms.npz")
    train(
        str(folder / "rooms.npz"),
        tokens=TokenConfig(num_bins=30, discretizer="uniform", goal_dims=(0, 1), rewards=False),
        model=ModelConfig(window=2, num_layers=2, width=48, dropout=0.0),
        train=TrainConfig(steps=500, batch_size=64, learning_rate=3e-3),
        out=folder / "run",
    )
    return folder / "run"


@pytest.fixture
def served(trained: Path) -> Iterator[tuple[str, int]]:
    """`tt view` of the model of the four rooms."""
    with serve(trained) as address:
        yield address


@contextmanager
def serve(run: Path, **environment: str) -> Iterator[tuple[str, int]]:
    """The address of `tt view` and the id of its process."""
    flags = ["--browser", "false", "--search.beam_width", "8", "--search.horizon", "3", "--search.context", "0"]
    command = [sys.executable, "-m", "trajectory_transformer", "view", str(run), *flags]
    variables = {**os.environ, **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    assert process.stdout is not None
    try:
        line = ""
        while "open http" not in line:
            line = process.stdout.readline()
            assert line, "tt view ended"
        yield line.split()[1], process.pid
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium, and there is none on the path (Debian: apt install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive Chromium")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


FIND = """name => {
    const models = Bokeh.documents[0]._all_models.values();
    return [...models].find(model => model.name === name);
}"""


COLUMNS = f"""name => {{
    const isList = each => Array.isArray(each) || ArrayBuffer.isView(each);
    const plain = values => Array.from(values, each => isList(each) ? [...each] : each);
    const data = ({FIND})(name)?.data ?? {{}};
    const columns = data instanceof Map ? [...data] : Object.entries(data);
    return JSON.stringify(Object.fromEntries(columns.map(([key, values]) => [key, plain(values)])));
}}"""


def data(page: Any, name: str) -> dict[str, list[Any]]:
    """The columns of a data source, as the browser has them; {} if there is none."""
    found: dict[str, list[Any]] = json.loads(page.evaluate(COLUMNS, name))
    return found


def text(page: Any, name: str) -> str:
    return str(page.evaluate(f"name => ({FIND})(name)?.text ?? ''", name))


def opened(browser: Any, url: str, width: int = 1280, *, shows: str = "agent", column: str = "x") -> Any:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.outside = []
    page.on("request", lambda request: page.outside.append(request.url) if _is_outside(request.url, url) else None)
    page.goto(url)
    page.wait_for_selector(".bk-tab")
    wait_for(lambda: bool(data(page, shows).get(column)))
    page.wait_for_load_state("networkidle")
    time.sleep(0.5)  # the layout settles after the first drawing
    return page


def _is_outside(requested: str, url: str) -> bool:
    return not requested.startswith((url.rsplit("/", 1)[0], "data:", "blob:"))


def wait_for(check: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait until a check holds; returns the seconds it took."""
    started = time.perf_counter()
    while not check():
        assert time.perf_counter() - started < seconds, "waited too long"
        time.sleep(0.01)
    return time.perf_counter() - started


def click_at(page: Any, x: float, y: float) -> None:
    """Click on a point of the four rooms."""
    click_share(page, (x + 0.02) / 1.04, 1 - (y + 0.02) / 1.04)


def click_share(page: Any, share_x: float, share_y: float) -> None:
    """Click on the map, at shares of its width and height from the top left."""
    frame = page.evaluate(
        f"() => {{ const view = Bokeh.index.find_one(({FIND})('map')); const b = view.frame.bbox;"
        " const r = view.el.getBoundingClientRect(); return [r.left + b.left, r.top + b.top, b.width, b.height] }"
    )
    left, top, width, height = frame
    page.mouse.click(left + share_x * width, top + share_y * height)


def set_slider(page: Any, name: str, value: float) -> None:
    page.evaluate(
        f"([name, value]) => {{ const slider = ({FIND})(name); slider.value = value; slider.value_throttled = value }}",
        [name, value],
    )


def press(page: Any, label: str) -> None:
    page.get_by_role("button", name=label, exact=True).click()


def test_a_clicked_goal_is_reached_and_a_slider_changes_the_beams(browser: Any, served: tuple[str, int]) -> None:
    page = opened(browser, served[0])
    page.get_by_text("start", exact=True).click()
    click_at(page, 0.2, 0.25)
    wait_for(lambda: abs(data(page, "agent")["x"][0] - 0.2) < 0.02)
    assert data(page, "agent")["y"][0] == pytest.approx(0.25, abs=0.02)
    page.get_by_text("goal", exact=True).click()
    click_at(page, 0.35, 0.38)
    seconds = wait_for(lambda: bool(data(page, "goal")["x"]) and abs(data(page, "goal")["x"][0] - 0.35) < 0.02)
    print(f"a click shows a plan after {seconds:.2f} s")
    before = data(page, "candidates")["xs"]
    assert len(before) == 8
    set_slider(page, "beam", 20)
    wait_for(lambda: len(data(page, "candidates")["xs"]) == 20)
    set_slider(page, "horizon", 5)
    wait_for(lambda: max(map(len, data(page, "candidates")["xs"])) == 5)
    assert data(page, "candidates")["xs"] != before
    set_slider(page, "horizon", 3)
    press(page, "Play")
    wait_for(lambda: "arrived" in text(page, "status"), 120)
    end = data(page, "agent")
    assert (end["x"][0] - 0.35) ** 2 + (end["y"][0] - 0.38) ** 2 < 0.06**2
    assert page.outside == []


def test_a_click_on_a_map_sets_the_goal(browser: Any, tmp_path: Path) -> None:
    data_file, run = tmp_path / "maps.npz", tmp_path / "run"
    walls = collect("MiniGrid-SimpleCrossingS9N1-v0", "expert", episodes=20, env_options={"max_steps": 40})
    save_npz(walls, data_file)
    train(
        str(data_file),
        tokens=TokenConfig(num_bins=9, goal_dims=(0, 1), rewards=False),
        model=ModelConfig(window=2, num_layers=1, num_heads=2, width=32, dropout=0.0, map_channels=4),
        train=TrainConfig(steps=5, batch_size=8),
        out=run,
    )
    with serve(run) as (url, _):
        page = opened(browser, url)
        ends = f"axis => {{ const range = ({FIND})('map')[axis]; return [range.start, range.end] }}"
        ranges = [page.evaluate(ends, axis) for axis in ("x_range", "y_range")]
        corner = (1.0, 7.0)  # free in all maps, and neither the start nor the goal of an episode
        x, y = ((value - low) / (high - low) for value, (low, high) in zip(corner, ranges, strict=True))
        click_share(page, x, 1.0 - y)
        wait_for(lambda: data(page, "goal") == {"x": [corner[0]], "y": [corner[1]]})
        assert len(data(page, "candidates")["xs"]) == 8
        press(page, "Step")
        wait_for(lambda: "Step 1" in text(page, "status"))
        page.screenshot(path=Path(os.environ.get("TT_SCREENSHOTS", tmp_path)) / "MiniGrid.png", full_page=True)


@pytest.mark.parametrize(("context", "shown"), [("egl", "frame"), ("none", "sticks")])
def test_a_body_is_rendered_or_drawn_as_a_stick_figure(browser: Any, tmp_path: Path, context: str, shown: str) -> None:
    if context == "egl" and not renders(context):
        pytest.skip("needs offscreen OpenGL by EGL (Debian: apt install libegl1 libgl1-mesa-dri)")
    dataset, run = collect("Hopper-v5", "random", episodes=10), tmp_path / "run"
    save_npz(dataset, tmp_path / "hopper.npz")
    small = ModelConfig(window=4, num_layers=1, num_heads=2, width=32, dropout=0.0)
    train(str(tmp_path / "hopper.npz"), model=small, train=TrainConfig(steps=5, batch_size=8), out=run)
    with serve(run, MUJOCO_GL="egl" if context == "egl" else "off") as (url, _):
        page = opened(browser, url, shows=shown, column="image" if shown == "frame" else "x0")
        before = data(page, shown)
        assert shown == "sticks" or len(set(before["image"][0])) > 10, "a picture of more than one colour"
        press(page, "Step")
        wait_for(lambda: "Step 1" in text(page, "status") and data(page, shown) != before)
        page.screenshot(path=Path(os.environ.get("TT_SCREENSHOTS", tmp_path)) / f"Body-{shown}.png", full_page=True)
        assert page.outside == []


def renders(context: str) -> bool:
    """Whether MuJoCo can render offscreen in a process of its own."""
    code = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).render()"
    made = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MUJOCO_GL": context}, capture_output=True)
    return made.returncode == 0


def test_a_click_on_a_wall_says_why_nothing_happens(browser: Any, served: tuple[str, int]) -> None:
    page = opened(browser, served[0])
    goal = data(page, "goal")
    click_at(page, 0.5, 0.3)
    wait_for(lambda: "goal must lie in the unit square" in text(page, "message"))
    assert data(page, "goal") == goal


@pytest.mark.parametrize("width", [1280, 400])
def test_every_tab_opens_and_names_of_the_data_are_plain_text(
    browser: Any, served: tuple[str, int], width: int, tmp_path: Path
) -> None:
    page = opened(browser, served[0], width)
    checks: dict[str, Callable[[], bool]] = {
        "Plan": lambda: len(data(page, "tokens").get("slot", [])) == 10 and "winner of 8" in text(page, "plan-text"),
        "Forecast": lambda: (
            len(data(page, "calibration").get("x", [])) > 0 and "inside the 50 % band" in text(page, "forecast-text")
        ),
        "Attention": lambda: "tokens" in text(page, "attention-text"),
        "Data": lambda: len(data(page, "bins").get("top", [])) == 30,
    }
    folder = Path(os.environ.get("TT_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"Control-{width}.png", full_page=True)
    for name, shown in checks.items():
        page.locator(".bk-tab", has_text=name).click()
        wait_for(shown)
        time.sleep(0.5)
        page.screenshot(path=folder / f"{name}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is too wide"
    assert data(page, "tokens")["slot"][2] == ATTACK
    assert page.title() != "attacked" and page.locator("img[src=x]").count() == 0
    assert page.outside == []


def test_a_second_tab_does_not_disturb_the_first(browser: Any, served: tuple[str, int]) -> None:
    first, second = opened(browser, served[0]), opened(browser, served[0])
    before = (data(first, "agent"), data(first, "goal"), data(first, "candidates"))
    press(second, "New episode")
    wait_for(lambda: data(second, "goal") != before[1])
    set_slider(second, "beam", 3)
    wait_for(lambda: len(data(second, "candidates")["xs"]) == 3)
    press(second, "Step")
    wait_for(lambda: "Step 1" in text(second, "status"))
    assert (data(first, "agent"), data(first, "goal"), data(first, "candidates")) == before
    press(first, "Step")
    wait_for(lambda: "Step 1" in text(first, "status"))


def test_a_closed_browser_ends_the_work(browser: Any, served: tuple[str, int]) -> None:
    url, process = served
    page = opened(browser, url)
    page.get_by_text("start", exact=True).click()
    click_at(page, 0.05, 0.05)
    set_slider(page, "beam", 64)
    press(page, "Play")
    wait_for(lambda: int(re.findall(r"Step (\d+)", text(page, "status"))[0]) >= 1)
    page.close()
    time.sleep(5)
    used = cpu_seconds(process)
    time.sleep(3)
    assert cpu_seconds(process) - used < 0.3


def cpu_seconds(process: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.timeout(1800)  # TT_CLICKS=3000 clicks for more than ten minutes
def test_memory_does_not_grow_while_clicking(browser: Any, served: tuple[str, int]) -> None:
    url, process = served
    page = opened(browser, url)

    def clicks(count: int) -> None:
        for number in range(count):
            press(page, "New episode" if number % 3 == 0 else "Replan" if number % 3 == 1 else "Step")
            if number % 10 == 0:
                set_slider(page, "beam", 4 + number % 20)
            time.sleep(0.02)
        time.sleep(2)

    def memory() -> float:
        return float(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0])

    rounds = int(os.environ.get("TT_CLICKS", "300"))
    clicks(rounds)
    before = memory()
    clicks(rounds)
    print(f"memory {before / 1024:.0f} MiB, after {rounds} more clicks {100 * (memory() / before - 1):+.2f} %")
    assert memory() < 1.05 * before


def test_nothing_is_served_to_other_hosts_or_without_the_secret(served: tuple[str, int]) -> None:
    url = served[0]
    port = int(re.findall(r":(\d+)/", url)[0])
    with urllib.request.urlopen(url, timeout=20) as answer:
        page = answer.read().decode()
    assert "cdn." not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)
    secret = url.rsplit("/", 1)[1]
    for path in ("", "wrong", "wrong/ws", f"{secret[:-1]}", "../", "static/../../etc/passwd"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://localhost:{port}/{path}", timeout=20)
        assert refused.value.code in (403, 404)
        assert secret not in refused.value.read().decode()
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    mine = [
        line.split()[1] for line in listening if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert mine == [f"0100007F:{port:04X}"], "bound to 127.0.0.1 alone"
    other = next((each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)), "127.0.0.1")
    if not str(other).startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((str(other), port), timeout=5)
