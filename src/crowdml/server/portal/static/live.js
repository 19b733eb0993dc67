/**
 * Follow a stream of numbers. Each event is an object of texts; whatever has `data-live` of that name shows it.
 * @typedef {Record<string, string | number>} News
 */

const AGAIN = 60_000; // milliseconds until a stream that was refused is asked for again

/** @param {string} address @param {(news: News) => void} heard */
export function follow(address, heard) {
  const stream = new EventSource(address);
  stream.onmessage = (event) => {
    /** @type {News} */
    const news = JSON.parse(event.data);
    show(news);
    heard(news);
  };
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) {
      setTimeout(() => follow(address, heard), AGAIN);
    }
  };
  addEventListener("pagehide", () => stream.close(), { once: true });
}

/** @param {News} news */
function show(news) {
  for (const place of document.querySelectorAll("[data-live]")) {
    const name = /** @type {HTMLElement} */ (place).dataset.live ?? "";
    const text = name === "state" ? news.state_text : news[name];
    if (text !== undefined && place.textContent !== String(text)) {
      place.textContent = String(text);
      if (name === "state") {
        place.className = `badge ${news.state}`;
      }
    }
  }
}
