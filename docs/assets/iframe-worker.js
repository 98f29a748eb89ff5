// Browsers start no worker in a page that was opened from a folder. There, run the worker's script, which is the
// search, in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.appendChild(this.frame);
      const scope = this.frame.contentWindow;
      const answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      scope.document.open();
      scope.document.close();
      scope.postMessage = answer;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.src = address;
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${address}`));
          scope.document.head.appendChild(script);
        });
      scope.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      this.ready = load(new URL(url, location.href).href);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
