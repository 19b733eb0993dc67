/**
 * What is refused, with the word that the wire protocol has for it (docs/protocol.md, "Problems").
 * Mirrors src/crowdml/wire/problems.py.
 */

/** Bytes, a task or a setting that this device refuses. `slug` names the kind of problem; the message is for people. */
export class Problem extends Error {
  /** @param {string} slug @param {string} detail */
  constructor(slug, detail) {
    super(detail);
    this.name = "Problem";
    this.slug = slug;
  }
}

/** Refuse bytes that are not what they should be. @param {string} detail @returns {never} */
export function malformed(detail) {
  throw new Problem("malformed", detail);
}
