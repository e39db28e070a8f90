/* Search works from disk: browsers start no worker from a file, so there the search's worker is a hidden frame. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const element = frame.contentDocument.createElement("script");
        Object.assign(element, { src: script, onload: () => resolve(inside), onerror: reject });
        frame.contentDocument.body.append(element);
      });
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
