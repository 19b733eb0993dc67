/** The checks of one file of vectors in a browser: `failures("messages")` on a page that has this module. */

/** @param {string} name @returns {Promise<string[]>} a sentence for each check that fails, and how many ran */
export async function failures(name) {
  const answer = await fetch(`/spec/vectors/${name}.json`);
  const vectors = answer.ok ? await answer.json() : null; // a module may be checked without vectors
  /** @type {{ checks: (vectors: unknown) => import("./checks/expect.js").Check[] }} */
  const { checks } = await import(`./checks/${name}.js`);
  const found = checks(vectors);
  /** @type {string[]} */
  const failed = [];
  for (const each of found) {
    try {
      await each.run();
    } catch (error) {
      failed.push(`${each.name}: ${error instanceof Error ? error.message : error}`);
    }
  }
  return found.length ? failed : ["no check ran"];
}
