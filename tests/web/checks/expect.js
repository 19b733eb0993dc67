/** Comparisons for the checks, which run in a browser and under Deno alike. */

/** @typedef {{ name: string, run: () => void | Promise<void> }} Check */

/** @param {string} name @param {() => void | Promise<void>} run @returns {Check} */
export function check(name, run) {
  return { name, run };
}

/** @param {unknown} found @param {unknown} wanted @param {string} [what] */
export function equal(found, wanted, what = "it") {
  const [one, other] = [show(found), show(wanted)];
  if (one !== other) throw new Error(`${what} is ${one.slice(0, 2000)}, and must be ${other.slice(0, 2000)}`);
}

/** @param {unknown} held @param {string} what */
export function holds(held, what) {
  if (!held) throw new Error(what);
}

/** The error that this raises; none is an error. @param {() => unknown} run
 * @returns {Promise<Error & { slug?: string }>} */
export async function refused(run) {
  try {
    await run();
  } catch (error) {
    if (error instanceof Error) return error;
  }
  throw new Error("nothing was refused");
}

/** @param {unknown} value @returns {string} */
function show(value) {
  return JSON.stringify(value, (_, each) => plain(each)) ?? "undefined";
}

/** @param {unknown} value */
function plain(value) {
  if (typeof value === "bigint") return `${value}n`;
  if (typeof value === "number" && !Number.isFinite(value)) return String(value);
  if (ArrayBuffer.isView(value) && !(value instanceof DataView)) return Array.from(/** @type {Uint8Array} */ (value));
  if (value && typeof value === "object" && !Array.isArray(value)) {
    return Object.fromEntries(Object.entries(value).toSorted(([a], [b]) => (a < b ? -1 : 1)));
  }
  return value;
}
