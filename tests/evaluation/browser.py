"""Run by a Python with PyQt6-WebEngine: opens a page in Chromium and prints what a reader would get, as JSON.

Command: python tests/evaluation/browser.py PAGE WIDTH
"""

import json
import sys

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

LOOK = """(() => {
  const box = mark => mark.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const isHidden = element => element.closest('.scroll') || element.classList.contains('hidden');
  return JSON.stringify({
    title: document.title,
    width: width,
    page_width: document.documentElement.scrollWidth,
    beyond: [...document.querySelectorAll('body *')]
      .filter(e => box(e).right > width + 1 && !isHidden(e)).map(e => e.tagName),
    focusable: document.querySelectorAll('[tabindex="0"]').length,
    tables: document.querySelectorAll('table').length,
    plots: [...document.querySelectorAll('.plot svg')].map(svg => ({
      name: document.getElementById(svg.getAttribute('aria-labelledby')).textContent,
      marks: [...svg.querySelectorAll('[id*="-mark-"]')].map(mark => [box(mark).width, box(mark).height]),
      color: getComputedStyle(svg.querySelector('text')).fill,
    })),
    nodes: [...document.querySelectorAll('.tree .node')].map(node => ({
      text: node.textContent,
      left: box(node).left,
      border: getComputedStyle(node).borderTopWidth,
    })),
    page_color: getComputedStyle(document.body).backgroundColor,
  });
})()"""


class Page(QWebEnginePage):
    """Notes what the console says."""

    said: list[str] = []  # noqa: RUF012  one page a process

    def javaScriptConsoleMessage(self, _level: object, message: str, *_: object) -> None:  # noqa: N802  Qt's name
        self.said.append(message)


class Requests(QWebEngineUrlRequestInterceptor):
    """Notes what is asked for."""

    urls: list[str] = []  # noqa: RUF012  one page a process

    def interceptRequest(self, info: object) -> None:  # noqa: N802  Qt's name
        self.urls.append(info.requestUrl().toString())


def main() -> None:
    """Open the page, wait for it, look."""
    app = QApplication(sys.argv[:1])
    requests, profile, view = Requests(), QWebEngineProfile(), QWebEngineView()
    profile.setUrlRequestInterceptor(requests)
    page = Page(profile, view)
    view.setPage(page)
    view.resize(int(sys.argv[2]), 1000)
    view.show()

    def show(found: str) -> None:
        print(json.dumps({**json.loads(found), "console": Page.said, "requests": Requests.urls}))  # noqa: T201  its result
        page.deleteLater()
        app.quit()

    page.loadFinished.connect(lambda _: QTimer.singleShot(500, lambda: page.runJavaScript(LOOK, show)))
    view.load(QUrl.fromLocalFile(sys.argv[1]))
    QTimer.singleShot(60_000, app.quit)
    app.exec()


if __name__ == "__main__":
    main()
