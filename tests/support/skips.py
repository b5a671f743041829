"""What was skipped when it ran last, for want of a library say: `--full --rest` runs it."""

KEY = "speccascade_jax/skipped"  # in pytest's cache: tests, and files that were skipped as a whole

OUT_OF_TIME = "out of time"


def file_of(test: str) -> str:
    return test.split("::")[0]


class Skips:
    """A plugin that keeps the skipped tests in pytest's cache. A test that ran since is none of them."""

    def __init__(self, cache):
        self.cache, self.ran, self.skipped, self.late = cache, set(), set(), set()

    def pytest_runtest_logreport(self, report):
        self.ran.add(report.nodeid)
        if report.skipped:
            self.skipped.add(report.nodeid)
            if OUT_OF_TIME in str(report.longrepr):
                self.late.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter):
        if self.late:
            files = ", ".join(sorted({file_of(test) for test in self.late}))
            terminalreporter.write_line(f"tests that did not begin in time: {len(self.late)} ({files})")

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self):
        ran = self.ran | {file_of(test) for test in self.ran}
        self.cache.set(KEY, sorted((set(self.cache.get(KEY, [])) - ran) | self.skipped))


def was_skipped(test: str, cache) -> bool:
    """Whether it was, alone or with its whole file."""
    return not {test, file_of(test)}.isdisjoint(cache.get(KEY, []))
