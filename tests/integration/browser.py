"""Opens pages in a headless Chromium and says what it sees, over the DevTools protocol.

    browser.py BROWSER PAGE [--screenshots DIR]

Prints one JSON object:
  messages  what the browser's console said: errors, refused scripts and styles
  requests  the addresses that were asked for, the page's own first
  tree      nodes of the accessibility tree by role
  views     by name ("wide", "narrow", "print", ... each also in dark): "overflow" in pixels, and the elements that
            stand out of the page; "bars" of the timeline and "amounts" of the table that can be seen, and those
            bars and texts that stand out of their drawing
  focus     what Tab goes to, in its order; "|visible" if it then tells of itself
  title     the document's

With --screenshots, DIR gets a picture of each view, one with something in focus, and the page as a PDF file.

Talks over two pipes, so that no library is needed and no other program can reach the browser.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile

VIEWS = {"wide": {"width": 1280}, "medium": {"width": 768}, "phone": {"width": 480}, "narrow": {"width": 400},
         "dark": {"width": 1280, "dark": True}, "dark-phone": {"width": 480, "dark": True}, "dark-narrow": {"width": 400, "dark": True},
         "print": {"width": 718, "media": "print"}, "print-dark": {"width": 718, "media": "print", "dark": True}}

LOOK = """(() => {
  const page = document.documentElement;
  const seen = (e) => e.getClientRects().length > 0;
  const inside = (e, selector) => { const r = e.getBoundingClientRect(); return r.width + r.height > 0 && e.closest(selector); };
  const out = [];
  for (const e of document.body.querySelectorAll("*")) {
    const r = e.getBoundingClientRect();
    const skip = e.closest(".skip, caption, .tip") || e.matches(".drawing g") || (e.closest(".scroll") && !e.matches(".scroll"));
    if (!skip && seen(e) && (r.right > page.clientWidth + 1 || r.left < -1)) out.push(e.tagName + "." + (e.getAttribute("class") || ""));
  }
  const drawings = [...document.querySelectorAll("svg.drawing")].filter(seen);
  const stands_out = (e, frame, slack) => {
    const r = e.getBoundingClientRect(), f = frame.getBoundingClientRect();
    return r.left < f.left - slack || r.right > f.right + slack || r.top < f.top - slack || r.bottom > f.bottom + slack;
  };
  const frame_of = (e) => e.closest("svg.drawing, svg.amount");
  return {overflow: page.scrollWidth - page.clientWidth, out, drawings: drawings.length,
          bars: [...document.querySelectorAll(".drawing .bar")].filter(seen).length,
          amounts: [...document.querySelectorAll(".amount")].filter(seen).length,
          bars_out: [...document.querySelectorAll(".bar")].filter(seen).filter((e) => stands_out(e, frame_of(e), 2)).length,
          texts_out: [...document.querySelectorAll(".drawing text:not(.tip)")].filter(seen)
            .filter((e) => stands_out(e, frame_of(e), 1)).map((e) => e.textContent),
          height: page.scrollHeight};
})()"""

FOCUSED = """(() => { const e = document.activeElement; if (e === document.body) return "";
  const tip = e.querySelector && e.querySelector(".tip");
  return (e.getAttribute("aria-label") || e.textContent) + (tip ? "|" + getComputedStyle(tip).visibility : ""); })()"""


class Browser:
    def __init__(self, program, folder):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def hand_over():
            # The protocol's own numbers. Copies of them first: they may be in each other's place.
            copies = os.dup(to_browser), os.dup(from_browser)
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
             "--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-pipe"],
            preexec_fn=hand_over, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.unread = b""
        self.last = 0
        self.events = []
        self.session = None

    def read(self):
        while b"\0" not in self.unread:
            more = os.read(self.read_end, 1 << 20)
            if not more:
                raise SystemExit(f"the browser ended: status {self.process.wait()}")
            self.unread += more
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def ask(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data):]
        while True:
            answer = self.read()
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def value(self, expression):
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise SystemExit(f"{expression[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, method):
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.read())

    def show(self, view):
        self.ask("Emulation.setDeviceMetricsOverride", width=view["width"], height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", media=view.get("media", "screen"),
                 features=[{"name": "prefers-color-scheme", "value": "dark" if view.get("dark") else "light"}])

    def screenshot(self, path, width, height):
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                        clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def tab(self):
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)


def probe(browser, page, screenshots):
    target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
    browser.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Log", "Runtime", "Network", "DOM", "Accessibility"):
        browser.ask(f"{domain}.enable")
    browser.events.clear()
    browser.ask("Page.navigate", url="file://" + os.path.abspath(page))
    browser.wait_for("Page.loadEventFired")
    out = {"views": {}, "focus": [], "tree": {}}
    for name, view in VIEWS.items():
        browser.show(view)
        seen = browser.value(LOOK)
        out["views"][name] = seen
        if screenshots:
            browser.screenshot(os.path.join(screenshots, name + ".png"), view["width"], min(seen["height"], 16000))
    browser.show(VIEWS["wide"])
    for node in browser.ask("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"]:
            role = node["role"]["value"]
            out["tree"][role] = out["tree"].get(role, 0) + 1
            # An image or a region without a name says nothing to who cannot see it.
            if role in ("image", "region", "table", "heading", "link") and not node.get("name", {}).get("value"):
                out["tree"]["nameless"] = out["tree"].get("nameless", 0) + 1
    for _ in range(60):
        browser.tab()
        focused = browser.value(FOCUSED)
        if not focused:
            break
        out["focus"].append(focused)
        if screenshots and focused.endswith("|visible") and "focus.png" not in os.listdir(screenshots):
            browser.screenshot(os.path.join(screenshots, "focus.png"), 1280, 2000)
    if screenshots:
        browser.ask("Emulation.setEmulatedMedia", media="")  # which else would hold for paper, too
        with open(os.path.join(screenshots, "paper.pdf"), "wb") as file:
            file.write(base64.b64decode(browser.ask("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)["data"]))
    out["title"] = browser.value("document.title")
    out["messages"] = [event["params"] for event in browser.events
                       if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    out["requests"] = [event["params"]["request"]["url"] for event in browser.events
                       if event.get("method") == "Network.requestWillBeSent"]
    return out


def main():
    program, page = sys.argv[1:3]
    screenshots = sys.argv[4] if sys.argv[3:4] == ["--screenshots"] else None
    if screenshots:
        os.makedirs(screenshots, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        try:
            print(json.dumps(probe(browser, page, screenshots)))
        finally:
            browser.process.kill()
            browser.process.wait()


if __name__ == "__main__":
    main()
