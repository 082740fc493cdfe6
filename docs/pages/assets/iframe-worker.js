// Lets the search work where a page was opened from a disk: browsers start no worker there. A hidden frame of this page
// runs the worker's script in its place; messages go to and fro as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      this.ready = new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = done;
        frame.contentDocument.head.appendChild(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => {
        const message = new this.inner.MessageEvent("message", { data });
        this.inner.dispatchEvent(message);
        if (this.inner.onmessage) this.inner.onmessage(message);
      });
    }
    terminate() {}
  };
}
