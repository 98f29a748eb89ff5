// Browsers start no worker in a page that was opened from a folder. There, run the worker's script, which is the
// search, in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      this.ready = new Promise((resolve) => (script.onload = resolve));
      frame.contentDocument.head.appendChild(script);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

// The search reads a hyphen as an operator: "held-" matches every page, and "held-out" every word that begins with
// "out". Pass "+held out" instead, which requires the first word.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function ({ type, data }) {
  if (typeof data === "string" && !data.includes('"')) {
    data = data.replace(/(^|\s)-+|-+(?=\s|$)/g, "$1").replace(/([^\s-]+)-+/g, "+$1 ");
  }
  post.call(this, { type, data });
};
