/**
 * From the bytes of a CSV file to samples: one line is one row, whatever stands in it. A row that cannot be used keeps its
 * place, and its sample adds nothing to what leaves. Mirrors src/crowdml/lines.py and device/rows.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./tasks.js").Task} Task
 * @typedef {{ x: Float32Array, y: number }} Sample `y` is -1 for no label
 * @typedef {import("./machine.js").Place} Place
 * @typedef {"blank" | "length" | "encoding" | "syntax" | "fields" | "number" | "label"} Why a row cannot be used
 * @typedef {{ [why in Why]?: number }} Faults for the owner alone: it depends on samples
 * @typedef {{ readonly rows: Sample[], readonly given: number, readonly faults: Faults, readonly goesOn: boolean,
 *   readonly placesAfter: (rows: number) => Promise<Place[]> }} Reading `given` rows were read before; it `goesOn` where
 *   reading stopped, or has no row that was not read. Otherwise nobody knows whether its rows were given in another order
 */

import { concat, sha256, toHex, toUtf8 } from "./bytes.js";
import { prepareRow } from "./features.js";

const [LINE_FEED, CARRIAGE_RETURN] = [10, 13];
const LONGEST = 2 ** 20;
const LONGEST_FIELD = 64;
const OTHER_MARKS = [";", "\t", "|"];
const DECIMAL_COMMA = /^\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*$/;
/** What Python reads as a float, spaces around it aside. */
const NUMBER = /^[+-]?(?:(?:\d(?:_?\d)*)(?:\.(?:\d(?:_?\d)*)?)?|\.\d(?:_?\d)*)(?:[eE][+-]?\d(?:_?\d)*)?$/;
const NOT_FINITE = /^[+-]?(?:inf|infinity|nan)$/i;

/** The lines of a file, without what ends them: each ends with a line feed, and what stands after the last is a line, too.
 * @param {Bytes} bytes @returns {Bytes[]} */
export function linesOf(bytes) {
  /** @type {Bytes[]} */
  const found = [];
  for (let start = 0; start < bytes.length;) {
    const feed = bytes.indexOf(LINE_FEED, start);
    const end = feed < 0 ? bytes.length : feed;
    const stop = end > start && bytes[end - 1] === CARRIAGE_RETURN ? end - 1 : end;
    found.push(bytes.subarray(start, stop));
    start = end + 1;
  }
  return found;
}

/** The fields of one line by itself; null where a quote is not closed or a line ends within one.
 * @param {string} text @param {string} mark @returns {string[] | null} */
export function fieldsOf(text, mark) {
  /** @type {string[]} */
  const fields = [];
  let at = 0;
  for (;;) {
    const field = text[at] === '"' ? quoted(text, at) : plain(text, at, mark);
    if (field === null) return null;
    fields.push(field.text);
    if (field.end === text.length) break;
    if (text[field.end] !== mark) return null;
    at = field.end + 1;
  }
  return mark === ";" ? fields.map((each) => (DECIMAL_COMMA.test(each) ? each.replace(",", ".") : each)) : fields;
}

/** @param {string} text @param {number} at @param {string} mark */
function plain(text, at, mark) {
  const found = text.indexOf(mark, at);
  const end = found < 0 ? text.length : found;
  const field = text.slice(at, end);
  return /[\r\n]/.test(field) ? null : { text: field, end };
}

/** @param {string} text @param {number} at */
function quoted(text, at) {
  for (let from = at + 1;;) {
    const end = text.indexOf('"', from);
    if (end < 0) return null;
    if (text[end + 1] !== '"') return { text: text.slice(at + 1, end).replaceAll('""', '"'), end: end + 1 };
    from = end + 2;
  }
}

/** What separates fields, by the first line, which counts as public: a comma wherever there is one. @param {string} first */
export function separatorOf(first) {
  if (fieldsOf(first, ",")?.length !== 1) return ",";
  return OTHER_MARKS.find((mark) => (fieldsOf(first, mark)?.length ?? 0) > 1) ?? ",";
}

/** A number as Python's float() reads it; null where it reads none. @param {string} text @returns {number | null} */
export function numberOf(text) {
  const found = text.trim();
  if (NUMBER.test(found)) return Number(found.replaceAll("_", ""));
  return NOT_FINITE.test(found) ? (/nan/i.test(found) ? NaN : found.startsWith("-") ? -Infinity : Infinity) : null;
}

/** Whether a first line names columns: none of its fields is a number, and one of them at least is there.
 * @param {string} first */
export function isHeading(first) {
  const fields = first.trim() ? fieldsOf(first, separatorOf(first)) : null;
  return fields !== null && fields.every((each) => numberOf(each) === null) && fields.some((each) => each.trim());
}

/** @param {Bytes} line */
function asPublic(line) {
  return new TextDecoder("utf-8").decode(line); // without its mark, and with what is no UTF-8 replaced
}

/** Why a file does not fit the task, by its first line alone, which counts as public; null if it does.
 * @param {Bytes} bytes @param {Task} task @returns {"empty" | "width" | null} */
export function firstLine(bytes, task) {
  const [line] = linesOf(bytes);
  if (!line) return "empty";
  const first = asPublic(line);
  const fields = fieldsOf(first, separatorOf(first));
  return fields !== null && fields.length === task.features.dimension + 1 ? null : "width";
}

/** One row: features as the task takes them and a label; the zero sample of no label where it cannot be used.
 * @param {Bytes} line @param {string} mark @param {Task} task @param {Faults} faults @returns {Sample} */
export function sampleOf(line, mark, task, faults) {
  const { dimension } = task.features;
  const read = rowOf(line, mark, task);
  if (typeof read !== "string") return read;
  faults[read] = (faults[read] ?? 0) + 1;
  return { x: new Float32Array(dimension), y: -1 };
}

/** @param {Bytes} line @param {string} mark @param {Task} task @returns {Sample | Why} */
function rowOf(line, mark, task) {
  const { dimension } = task.features;
  if (line.length > LONGEST + LONGEST_FIELD * (dimension + 1)) return "length";
  /** @type {string} */
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(line);
  } catch {
    return "encoding";
  }
  if (!text.trim()) return "blank";
  const fields = fieldsOf(text, mark);
  if (fields === null) return "syntax";
  if (fields.length !== dimension + 1) return "fields";
  const numbers = fields.slice(0, -1).map(numberOf);
  if (numbers.some((each) => each === null || !Number.isFinite(each))) return "number";
  const y = labelOf(fields[dimension], task);
  return y === null ? "label" : { x: prepareRow(task.features, /** @type {number[]} */ (numbers)), y };
}

/** @param {string} text @param {Task} task @returns {number | null} */
function labelOf(text, { labels: { classes } }) {
  const named = classes.indexOf(text.trim());
  if (named >= 0) return named;
  const number = numberOf(text);
  return number !== null && Number.isInteger(number) && number >= 0 && number < classes.length ? number : null;
}

/** The rows of a file that were not read before. A file that begins with lines which were read before goes on after them,
 * however its lines end.
 * @param {Bytes} bytes @param {Task} task @param {readonly Place[]} places @returns {Promise<Reading>} */
export async function readFile(bytes, task, places) {
  const lines = linesOf(bytes);
  const first = lines.length ? asPublic(lines[0]) : "";
  if (lines.length) lines[0] = withoutMark(lines[0]);
  const mark = separatorOf(first);
  const begin = isHeading(first) ? 1 : 0;
  const known = new Map(places.map((place) => [place.hash, place]));
  let last = { lines: 0, hash: "", ends: false };
  while (last.lines < begin) last = await placeOf(last, lines);
  let given = last;
  while (given.lines < lines.length) {
    const found = known.get((await placeOf(given, lines)).hash);
    if (!found) break;
    given = found;
  }
  /** @type {Faults} */
  const faults = {};
  const rows = lines.slice(given.lines).map((line) => sampleOf(line, mark, task, faults));
  let taken = given;
  return {
    rows,
    given: given.lines - begin,
    faults,
    goesOn: !rows.length || given.ends,
    placesAfter: async (count) => {
      const found = taken.lines > begin ? [{ ...taken, ends: false }] : [];
      for (let at = 0; at < count; at++) {
        taken = { ...(await placeOf(taken, lines)), ends: at === count - 1 };
        found.push(taken);
      }
      return found;
    },
  };
}

/** The place after one more line: a chain of hashes, over lines without what ends them.
 * @param {Place} before @param {readonly Bytes[]} lines @returns {Promise<Place>} */
async function placeOf(before, lines) {
  const line = lines[before.lines];
  const hash = toHex(await sha256(concat(toUtf8(`${before.hash}\n`), line, toUtf8("\n"))));
  return { lines: before.lines + 1, hash, ends: false };
}

/** A first line without its byte-order mark. @param {Bytes} line @returns {Bytes} */
function withoutMark(line) {
  return line[0] === 0xef && line[1] === 0xbb && line[2] === 0xbf ? line.subarray(3) : line;
}
