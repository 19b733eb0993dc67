/**
 * The checks of one file of vectors under Deno: `deno test vectors_test.js -- messages spec/vectors`.
 * The same checks run in a browser (page.js).
 */

const [name, folder] = Deno.args;
const vectors = JSON.parse(Deno.readTextFileSync(`${folder}/${name}.json`));
/** @type {{ checks: (vectors: unknown) => import("./checks/expect.js").Check[] }} */
const { checks } = await import(`./checks/${name}.js`);
for (const each of checks(vectors)) Deno.test(`${name}: ${each.name}`, async () => await each.run());
