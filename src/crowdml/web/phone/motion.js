/**
 * The phone's accelerometer, for one page: permission, windows of motion, and a sentence's name for each way it can fail.
 *
 * Readings are taken while the page is visible, and at no other time.
 *
 * @typedef {"off" | "starting" | "sensing" | "hidden" | "insecure" | "missing" | "refused" | "silent" | "zeros"} Sensing
 */

import { Cutter } from "../device/sensing.js";

/** Milliseconds after which a sensor that has said nothing is taken for silent. */
const PATIENCE = 1000;
/** Readings after which a sensor that has said nothing but zeros is taken for broken. */
const ZEROS = 20;

/** Ask for the sensor, inside a tap: browsers that ask their owner do so only then. @returns {Promise<Sensing>} */
export async function askForMotion() {
  if (!isSecureContext) return "insecure";
  if (typeof DeviceMotionEvent === "undefined") return "missing";
  const { requestPermission } = /** @type {{ requestPermission?: () => Promise<string> }} */ (
    /** @type {unknown} */ (DeviceMotionEvent)
  );
  if (!requestPermission) return "starting";
  try {
    return (await requestPermission.call(DeviceMotionEvent)) === "granted" ? "starting" : "refused";
  } catch {
    return "refused";
  }
}

/** Listens to the sensor, keeps the screen awake meanwhile, and cuts windows. */
export class Motion {
  /** @param {{ window: (magnitudes: Float64Array) => void, changed: (state: Sensing) => void }} told */
  constructor(told) {
    this.told = told;
    this.cutter = new Cutter();
    /** @type {Sensing} */
    this.state = "off";
    this.zeros = 0;
    /** @type {WakeLockSentinel | null} */
    this.lock = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.listen = this.listen.bind(this);
    document.addEventListener("visibilitychange", () => this.follow());
  }

  get isOn() {
    return !["off", "insecure", "missing", "refused"].includes(this.state);
  }

  start() {
    if (this.isOn) return;
    addEventListener("devicemotion", this.listen);
    this.become("starting");
    this.follow();
  }

  stop() {
    removeEventListener("devicemotion", this.listen);
    clearTimeout(this.timer);
    this.cutter.restart();
    this.sleep();
    this.become("off");
  }

  /** What hides the page ends the window that is under way. */
  follow() {
    if (!this.isOn) return;
    this.cutter.restart();
    this.zeros = 0;
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") {
      this.become("hidden");
      return;
    }
    this.become("starting");
    this.timer = setTimeout(() => this.become("silent"), PATIENCE);
    void this.wake();
  }

  /** @param {DeviceMotionEvent} event */
  listen(event) {
    if (document.visibilityState === "hidden") return;
    const { x, y, z } = event.accelerationIncludingGravity ?? {};
    if (typeof x !== "number" || typeof y !== "number" || typeof z !== "number") return; // a browser without a sensor
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.become("silent"), PATIENCE);
    this.zeros = x === 0 && y === 0 && z === 0 ? this.zeros + 1 : 0;
    if (this.zeros >= ZEROS) {
      this.cutter.restart();
      this.become("zeros");
      return;
    }
    this.become("sensing");
    for (const window of this.cutter.add({ at: event.timeStamp, x, y, z })) this.told.window(window);
  }

  /** @param {Sensing} state */
  become(state) {
    if (state === this.state) return;
    this.state = state;
    this.told.changed(state);
  }

  async wake() {
    try {
      this.lock ??= await navigator.wakeLock?.request("screen") ?? null;
      this.lock?.addEventListener("release", () => (this.lock = null));
    } catch {
      this.lock = null; // a phone with little battery refuses: sensing goes on while the screen is on
    }
  }

  sleep() {
    void this.lock?.release();
    this.lock = null;
  }
}
