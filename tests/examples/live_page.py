"""Run by a Python that has PyQt6-WebEngine: uses the side-by-side page in Chromium as a reader would and prints what is seen, as JSON.

Command: python tests/examples/live_page.py URL WIDTH PROMPT PICTURE
"""

import json
import sys

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

POLL_MILLISECONDS, LONGEST_MILLISECONDS = 50, 240_000
ASK = """(prompt => {
  const box = document.querySelector('#question textarea'), button = document.querySelector('#write');
  if (!box || !button) return false;
  box.focus();
  box.select();
  document.execCommand('insertText', false, prompt);
  button.click();
  return true;
})(%s)"""
LOOK = """(() => {
  const text = name => document.querySelector('#' + name)?.innerText ?? '';
  const value = name => document.querySelector('#' + name + ' textarea')?.value ?? '';
  const width = document.documentElement.clientWidth;
  return JSON.stringify({
    verdict: text('verdict'),
    alone: value('alone'), alone_speed: text('alone-speed'),
    drafted: value('drafted'), drafted_speed: text('drafted-speed'),
    tree_title: text('tree-title'),
    nodes: [...document.querySelectorAll('#tree .node')].map(node => node.innerText),
    kept_border: document.querySelector('#tree .kept') && getComputedStyle(document.querySelector('#tree .kept')).borderTopWidth,
    has_plot: document.querySelectorAll('#plot svg path').length > 0,
    is_wide: document.documentElement.scrollWidth > width + 1,
    elsewhere: performance.getEntriesByType('resource').map(entry => entry.name).filter(name => !name.startsWith(location.origin) && !name.startsWith('data:')),
  });
})()"""


class Page(QWebEnginePage):
    """Notes what the console says."""

    said: list[str] = []  # noqa: RUF012  one page a process

    def javaScriptConsoleMessage(self, level: object, message: str, *_: object) -> None:  # noqa: N802  Qt's name
        self.said.append(f"{level}: {message}")


def main() -> None:
    """Type, press, watch until the comparison stands there, and take a picture."""
    url, width, prompt, picture = sys.argv[1:]
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)
    view.resize(int(width), 1500)
    view.show()
    seen: list[dict[str, object]] = []

    def ask() -> None:
        page.runJavaScript(ASK % json.dumps(prompt), asked)

    def asked(is_there: bool) -> None:
        QTimer.singleShot(POLL_MILLISECONDS, look if is_there else ask)

    def look() -> None:
        page.runJavaScript(LOOK, looked)

    def looked(found: str) -> None:
        state = json.loads(found)
        if not seen or state != seen[-1]:
            seen.append(state)
        is_done = "as fast" in state["verdict"] and state["has_plot"]
        QTimer.singleShot(*((1000, finish) if is_done else (POLL_MILLISECONDS, look)))

    def finish() -> None:
        view.grab().save(picture)
        page.deleteLater()
        app.quit()

    view.load(QUrl(url))
    ask()
    QTimer.singleShot(LONGEST_MILLISECONDS, app.quit)
    app.exec()
    print(json.dumps({"seen": seen, "console": Page.said}))  # noqa: T201  its result


if __name__ == "__main__":
    main()
