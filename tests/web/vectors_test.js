/**
 * The checks of one file of vectors under Deno: `deno test vectors_test.js -- messages spec/vectors`.
 * The same checks run in a browser (page.js).
 */

const [name, folder] = Deno.args;
const vectors = read(`${folder}/${name}.json`);
/** @type {{ checks: (vectors: unknown) => import("./checks/expect.js").Check[] }} */
const { checks } = await import(`./checks/${name}.js`);

/** What the file holds; null where a module is checked without vectors. @param {string} path @returns {unknown} */
function read(path) {
  try {
    return JSON.parse(Deno.readTextFileSync(path));
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return null;
    throw error;
  }
}

for (const each of checks(vectors)) Deno.test(`${name}: ${each.name}`, async () => await each.run());
