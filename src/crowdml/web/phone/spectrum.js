/** The spectrum of the last seconds as bars, drawn on a canvas in the page's own colours. */

import { BINS, spectrum } from "../device/spectrum.js";

const BARS = BINS / 2;

/** Draw what the phone moves now; nothing where there are too few readings. Bin 0, which is gravity, is left out.
 * @param {HTMLCanvasElement} canvas @param {readonly number[]} magnitudes the last 64 */
export function drawSpectrum(canvas, magnitudes) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth * ratio, canvas.clientHeight * ratio].map(Math.round);
  if (!width || !height) return;
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d");
  if (!pen) return;
  const style = getComputedStyle(canvas);
  pen.clearRect(0, 0, width, height);
  const values = magnitudes.length === BINS ? spectrum(Float64Array.from(magnitudes)).slice(1, BARS + 1) : [];
  const gap = Math.max(1, Math.round(width / BARS / 4));
  const each = width / BARS;
  for (let bar = 0; bar < BARS; bar++) {
    const share = Math.min(1, Math.sqrt((values[bar] ?? 0) / 4));
    const size = Math.max(2 * ratio, share * height);
    pen.fillStyle = share > 0.01 ? style.color : style.borderTopColor;
    pen.beginPath();
    pen.roundRect(bar * each + gap / 2, height - size, each - gap, size, Math.min(3 * ratio, (each - gap) / 2));
    pen.fill();
  }
}
