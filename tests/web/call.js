/** Calls one function under Deno: `call.js MODULE FUNCTION`, its arguments on stdin and its value on stdout as JSON. */

const [module, name] = Deno.args;
/** @type {unknown[]} */
const values = JSON.parse(await new Response(Deno.stdin.readable).text());
/** @type {{ [name: string]: (...values: unknown[]) => unknown }} */
const functions = await import(`./${module}`);
console.log(JSON.stringify((await functions[name](...values)) ?? null));
