"""Run by a Python that has PyQt6-WebEngine: uses the side-by-side page in Chromium as a reader would and prints what is seen, as JSON.

Command: python tests/examples/live_page.py URL WIDTH PROMPT PICTURE
"""

import json
import sys

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

POLL_MILLISECONDS, DRAWN_MILLISECONDS, LONGEST_MILLISECONDS = 50, 1500, 240_000
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
    has_plot: document.querySelectorAll('#plot svg rect').length > 0,
    is_wide: document.documentElement.scrollWidth > width + 1,
    elsewhere: performance.getEntriesByType('resource').map(entry => entry.name).filter(name => !name.startsWith(location.origin) && !name.startsWith('data:')),
  });
})()"""


class Visit(QWebEnginePage):
    """A reader who types a prompt, presses the button, watches until the comparison stands there, and takes a picture."""

    def __init__(self, view: QWebEngineView, prompt: str, picture: str) -> None:
        super().__init__(view)
        self.view, self.prompt, self.picture, self.is_done = view, prompt, picture, False
        self.seen: list[dict[str, object]] = []
        self.said: list[str] = []

    def javaScriptConsoleMessage(self, level: object, message: str, *_: object) -> None:  # noqa: N802  Qt's name
        """Note what the console says."""
        self.said.append(f"{level}: {message}")

    def ask(self) -> None:
        """Type and press, once the page is there."""
        self.runJavaScript(ASK % json.dumps(self.prompt), self._asked)

    def _asked(self, is_there: bool) -> None:
        QTimer.singleShot(POLL_MILLISECONDS, self._look if is_there else self.ask)

    def _look(self) -> None:
        self.runJavaScript(LOOK, self._looked)

    def _looked(self, found: str) -> None:
        state = json.loads(found)
        if not self.seen or state != self.seen[-1]:
            self.seen.append(state)
        if self.is_done:
            self.view.grab().save(self.picture)
            self.deleteLater()  # before its profile
            QApplication.quit()
            return
        self.is_done = "as fast" in state["verdict"]
        QTimer.singleShot(DRAWN_MILLISECONDS if self.is_done else POLL_MILLISECONDS, self._look)


def main() -> None:
    """Visit the page."""
    url, width, prompt, picture = sys.argv[1:]
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    page = Visit(view, prompt, picture)
    view.setPage(page)
    view.resize(int(width), 1500)
    view.show()
    view.load(QUrl(url))
    page.ask()
    QTimer.singleShot(LONGEST_MILLISECONDS, app.quit)
    app.exec()
    print(json.dumps({"seen": page.seen, "console": page.said}))  # noqa: T201  its result


if __name__ == "__main__":
    main()
