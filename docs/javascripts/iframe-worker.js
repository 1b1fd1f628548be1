// A page that is opened from the disk may start no worker: run the search's script in a hidden frame instead.
// material's offline plugin would load https://unpkg.com/iframe-worker for that; it knows this file by its name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.scope = new Promise(resolve => {
        frame.onload = () => {
          const scope = frame.contentWindow
          scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = scope.document.createElement("script")
          script.src = url
          script.onload = () => resolve(scope)
          scope.document.body.append(script)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
