/**
 * What a device keeps, in IndexedDB: ledger, outbox, samples that wait and state in one database, its key in another.
 *
 * A write is one transaction with strict durability, and returns when it is complete. After a write that signed a message its
 * hash is marked beside the key: a ledger that does not know the mark was lost, or is an older one.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./keys.js").Key} Key
 * @typedef {import("./machine.js").Charge} Charge
 * @typedef {import("./machine.js").Membership} Membership
 * @typedef {import("./machine.js").Message} Message
 * @typedef {import("./machine.js").Place} Place
 * @typedef {import("./machine.js").Records} Records
 * @typedef {import("./machine.js").Sample} Sample
 * @typedef {import("./machine.js").Whole} Whole
 * @typedef {{ readonly task: string, readonly hash: string, readonly samples: number }} Mark of the last signed message
 * @typedef {{ readonly key: Key | null, readonly mark: Mark | null }} Identity
 * @typedef {object} Found
 * @property {Whole | null} whole
 * @property {readonly Membership[]} memberships
 * @property {readonly Charge[]} charges
 * @property {readonly Message[]} messages
 * @property {readonly Sample[]} samples
 * @property {readonly Place[]} places
 */

export const LEDGER = "crowdml";
export const KEYS = "crowdml-key";
const VERSION = 1;
const STORES = ["whole", "memberships", "charges", "messages", "samples", "places"];

/** The two databases of this origin's device. */
export class Store {
  /** @param {IDBDatabase} ledger @param {IDBDatabase} keys */
  constructor(ledger, keys) {
    this.ledger = ledger;
    this.keys = keys;
  }

  /** @returns {Promise<Store>} */
  static async open() {
    return new Store(await openDatabase(LEDGER, makeLedger), await openDatabase(KEYS, makeKeys));
  }

  /** @returns {Promise<Found>} */
  async read() {
    const transaction = this.ledger.transaction(STORES);
    const [whole, memberships, charges, messages, samples, places] = await Promise.all(
      STORES.map((name) => result(transaction.objectStore(name).getAll())),
    );
    return { whole: whole[0] ?? null, memberships, charges, messages, samples, places };
  }

  /** One transaction: it is on disk when this returns, or nothing of it is. @param {Records} records
   * @param {number} [given] samples that the device has given with these records */
  async write({ membership, whole, charges = [], messages = [], samples = [], forget = [], places = [] }, given = 0) {
    const transaction = this.ledger.transaction(STORES, "readwrite", { durability: "strict" });
    const done = complete(transaction);
    /** @param {string} name */
    const of = (name) => transaction.objectStore(name);
    if (membership) of("memberships").put(membership);
    if (whole) of("whole").put(whole, "device");
    for (const charge of charges) of("charges").add(charge);
    for (const message of messages) of("messages").put(message);
    for (const sample of samples) of("samples").put(sample);
    for (const serial of forget) of("samples").delete(serial);
    for (const place of places) of("places").put(place);
    await done;
    const signed = messages.findLast(({ receipt, dropped }) => receipt === null && !dropped);
    if (signed) await this.mark({ task: signed.task, hash: signed.hash, samples: given });
  }

  /** @param {Mark} mark */
  async mark(mark) {
    const transaction = this.keys.transaction(["identity"], "readwrite", { durability: "strict" });
    const done = complete(transaction);
    transaction.objectStore("identity").put(mark, "mark");
    await done;
  }

  /** @returns {Promise<Identity>} */
  async identity() {
    const store = this.keys.transaction(["identity"]).objectStore("identity");
    const [key, mark] = await Promise.all([result(store.get("key")), result(store.get("mark"))]);
    return { key: key ?? null, mark: mark ?? null };
  }

  /** @param {Key} key its private half is a CryptoKey that no script can read */
  async keepKey(key) {
    const transaction = this.keys.transaction(["identity"], "readwrite", { durability: "strict" });
    const done = complete(transaction);
    transaction.objectStore("identity").put(key, "key");
    transaction.objectStore("identity").delete("mark");
    await done;
  }

  /** Erase everything that this device keeps, key included. */
  async erase() {
    this.ledger.close();
    this.keys.close();
    await Promise.all([LEDGER, KEYS].map((name) => result(indexedDB.deleteDatabase(name))));
  }
}

/** @param {string} name @param {(database: IDBDatabase) => void} make @returns {Promise<IDBDatabase>} */
function openDatabase(name, make) {
  const request = indexedDB.open(name, VERSION);
  request.addEventListener("upgradeneeded", () => make(request.result));
  return result(request);
}

/** @param {IDBDatabase} database */
function makeLedger(database) {
  database.createObjectStore("whole");
  database.createObjectStore("memberships", { keyPath: "task" });
  database.createObjectStore("charges", { autoIncrement: true });
  database.createObjectStore("messages", { keyPath: "hash" }).createIndex("order", ["task", "seq"]);
  database.createObjectStore("samples", { keyPath: "serial" });
  database.createObjectStore("places", { keyPath: "hash" });
}

/** @param {IDBDatabase} database */
function makeKeys(database) {
  database.createObjectStore("identity");
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function result(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}

/** @param {IDBTransaction} transaction @returns {Promise<void>} */
function complete(transaction) {
  return new Promise((resolve, reject) => {
    transaction.addEventListener("complete", () => resolve());
    transaction.addEventListener("abort", () => reject(transaction.error ?? new Error("The write was not completed.")));
  });
}
