// Search a built site as its pages do. Usage: node site_search.js SITE QUERY..., prints {query: [location, ...]}.
// The first location of a query is the section that its result list shows first.

const { readFileSync, readdirSync } = require("fs");
const { join } = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = join(site, "assets", "javascripts", "workers");
const [search] = readdirSync(workers).filter((name) => name.endsWith(".js"));

// The worker's script and the page's script, each with the few globals of a browser that it uses.
let receive, answer;
const worker = { console, addEventListener: (_, listener) => (receive = listener), postMessage: (data) => answer(data) };
worker.self = worker;
vm.runInNewContext(readFileSync(join(workers, search), "utf8"), worker);
class Worker {
  postMessage(data) {
    receive({ data });
  }
}
vm.runInNewContext(readFileSync(join(site, "assets", "iframe-worker.js"), "utf8"), { Worker, location: {} });

const ask = (type, data) =>
  new Promise((resolve) => {
    answer = resolve;
    new Worker().postMessage({ type, data });
  });

(async () => {
  const index = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf8"));
  await ask(0, { ...index, options: {} });
  const results = {};
  for (const query of queries) {
    const { items } = (await ask(2, query)).data;
    results[query] = items.map((sections) => sections[0].location);
  }
  console.log(JSON.stringify(results));
})();
