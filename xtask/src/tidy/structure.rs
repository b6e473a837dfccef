//! The structure of each crate: which files import each other in a circle, over how many files the methods of one type
//! are spread, and the layers of a crate.

use super::{Problem, Source, code::Code};
use std::collections::{BTreeMap, BTreeSet};

/// The layers of a crate, lowest first. A module may import its own layer and lower ones.
struct Layers {
    name: &'static str,
    layers: &'static [&'static [&'static str]],
    /// Most files in one circle of imports; 1: no circle.
    most_in_circle: usize,
}

/// The first layer of the cache has the owners of state, and the notifier's queue; they know nothing of requests.
const LAYERS: &[Layers] = &[
    Layers {
        name: "cache",
        layers: &[
            &[
                "byte_ranges",
                "calls",
                "config",
                "contents",
                "cookies32",
                "counters",
                "grants",
                "inotify",
                "notifier_queue",
                "kernel",
                "op",
                "open",
                "pages",
                "prefetch",
                "session",
                "store",
            ],
            &["state"],
            &["view"],
            &["out"],
            &["facts"],
            &["page_cache"],
            &["memory", "ops", "watching"],
            &["inputs"],
            &["cache"],
        ],
        most_in_circle: 5,
    },
    Layers {
        name: "lease",
        layers: &[
            &["grace", "locks", "merge_base", "replies", "types", "write_history"],
            &["state"],
            &["rules"],
            &["report"],
            &["table"],
            &["discarded", "unsent_grants"],
            &["sequencer"],
        ],
        most_in_circle: 5,
    },
    Layers {
        name: "ninep",
        layers: &[&["error", "frame", "listing", "message", "values", "wire"], &["session"]],
        most_in_circle: 1,
    },
    Layers {
        name: "pathclient",
        layers: &[&["drop_queue", "inode_numbers", "schedule"], &["executor", "nodes"]],
        most_in_circle: 1,
    },
    Layers {
        name: "server",
        layers: &[
            &["limits", "os"],
            &["export"],
            &["lease"],
            &["ops", "watch"],
            &["pool", "session"],
            &["connection", "server"],
            &["daemon"],
        ],
        most_in_circle: 7,
    },
];
/// Most files with `impl` blocks of one type.
const MOST_SPREAD: usize = 6;

/// A file of a crate, without tests.
struct File<'a> {
    source: &'a Source,
    /// Without re-exports.
    code: String,
    /// Items that it exports from other modules: name and path.
    exports: BTreeMap<String, String>,
}

/// Files of one crate by their module path (`ops::lookup`).
struct Crate<'a> {
    name: &'a str,
    files: BTreeMap<String, File<'a>>,
}

impl<'a> Crate<'a> {
    fn all(sources: &'a [Source]) -> Vec<Crate<'a>> {
        let mut crates: BTreeMap<&str, Crate> = BTreeMap::new();
        for source in sources.iter().filter(|source| source.is_rust() && !source.is_test()) {
            let Some(name) = source.layer() else { continue };
            let Some(path) = source.path.strip_prefix(&format!("crates/{name}/src/")) else { continue };
            let path = path.trim_end_matches(".rs").trim_end_matches("/mod").replace('/', "::");
            let files = BTreeMap::new();
            let of = crates.entry(name).or_insert(Crate { name, files });
            let base = if path == "lib" { "" } else { &path };
            let (code, exports) = exports(&Code::of(&source.text).shipped, base);
            of.files.insert(path, File { source, code, exports });
        }
        crates.into_values().collect()
    }

    /// Returns the modules with the items that a module names by `crate::`, `super::` or the name of a module in it.
    fn imports(&self, module: &str) -> BTreeSet<&str> {
        let Some(File { code, .. }) = self.files.get(module) else { return BTreeSet::new() };
        let base = if module == "lib" { "" } else { module };
        let named = paths(code, base).into_iter().chain(children(code, base));
        named.filter_map(|path| self.file_of(path)).filter(|other| *other != module).collect()
    }

    /// Returns the file with the item of that path, behind re-exports: that of its longest known beginning.
    fn file_of(&self, mut path: String) -> Option<&str> {
        loop {
            let module = self.module_of(&path);
            let (known, file) = self.files.get_key_value(module.unwrap_or("lib"))?;
            let rest = module.map_or(path.as_str(), |module| path[module.len()..].trim_start_matches("::"));
            let (item, below) = rest.split_once("::").unwrap_or((rest, ""));
            match file.exports.get(item) {
                Some(exported) if below.is_empty() => path.clone_from(exported),
                Some(exported) => path = format!("{exported}::{below}"),
                None => return module.map(|_| known.as_str()),
            }
        }
    }

    /// Returns the longest beginning of a path that is a module.
    fn module_of<'p>(&self, mut path: &'p str) -> Option<&'p str> {
        while !self.files.contains_key(path) {
            path = path.rsplit_once("::")?.0;
        }
        Some(path)
    }

    /// Returns the circles of imports, the largest first.
    fn circles(&self) -> Vec<Vec<&str>> {
        let edges: BTreeMap<&str, BTreeSet<&str>> =
            self.files.keys().map(|module| (module.as_str(), self.imports(module))).collect();
        let reach: BTreeMap<&str, BTreeSet<&str>> =
            edges.keys().map(|module| (*module, reachable(&edges, module))).collect();
        let mut circles: Vec<Vec<&str>> = Vec::new();
        let mut placed: BTreeSet<&str> = BTreeSet::new();
        for (module, from) in &reach {
            if placed.contains(module) {
                continue;
            }
            let circle: Vec<&str> =
                from.iter().copied().filter(|other| reach[other].contains(module)).collect();
            placed.extend(&circle);
            if circle.len() > 1 {
                circles.push(circle);
            }
        }
        circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        circles
    }

    /// Returns the types with `impl` blocks in several files, those in most files first.
    fn spread(&self) -> Vec<(String, usize)> {
        let mut files: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (module, file) in &self.files {
            for name in file.code.lines().filter_map(implemented) {
                files.entry(name).or_default().insert(module);
            }
        }
        let mut spread: Vec<(String, usize)> = files
            .into_iter()
            .map(|(name, files)| (name, files.len()))
            .filter(|(_, count)| *count > 1)
            .collect();
        spread.sort_by_key(|(name, count)| (std::cmp::Reverse(*count), name.clone()));
        spread
    }

    fn lines(&self) -> usize {
        self.files.values().map(|file| file.source.text.lines().count()).sum()
    }
}

/// Returns the modules that can be reached from one, itself among them if it is in a circle.
fn reachable<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = edges.get(from).into_iter().flatten().copied().collect();
    while let Some(module) = open.pop() {
        if found.insert(module) {
            open.extend(edges.get(module).into_iter().flatten());
        }
    }
    found
}

/// Returns the type of an inherent `impl` block.
fn implemented(line: &str) -> Option<String> {
    let rest = line.strip_prefix("impl")?;
    let rest = if rest.starts_with('<') { rest.split_once("> ")?.1 } else { rest.strip_prefix(' ')? };
    let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!rest.contains(" for ") && !name.is_empty()).then_some(name)
}

/// Returns the paths in a module's code that begin with `crate::` or `super::`, from the crate's root.
fn paths(code: &str, module: &str) -> Vec<String> {
    let mut found = Vec::new();
    for word in ["crate::", "super::"] {
        for at in places(code, word) {
            let mut rest = &code[at..];
            let mut base = if word == "crate::" { "" } else { module };
            while let Some(above) = rest.strip_prefix("super::") {
                (rest, base) = (above, base.rsplit_once("::").map_or("", |(base, _)| base));
            }
            found.extend(tails(base, rest.strip_prefix("crate::").unwrap_or(rest)));
        }
    }
    found
}

/// Returns the paths in a module's code that begin with a module that it declares.
fn children(code: &str, module: &str) -> Vec<String> {
    let named = |name: &&str| {
        let at = places(code, &format!("{name}::"));
        at.into_iter().flat_map(|at| tails(module, &code[at..])).collect::<Vec<String>>()
    };
    declared(code).iter().flat_map(named).collect()
}

/// Returns the modules that a module declares.
fn declared(code: &str) -> BTreeSet<&str> {
    let names = places(code, "mod ").into_iter().filter_map(|at| code[at + 4..].split_once(';'));
    names.map(|(name, _)| name).filter(|name| !name.contains(char::is_whitespace)).collect()
}

/// Returns a module's code without its re-exports, and these: the name and path of each item.
fn exports(code: &str, module: &str) -> (String, BTreeMap<String, String>) {
    let (mut rest, mut exports) = (code.to_owned(), BTreeMap::new());
    let is_public = |at: &usize| {
        let line = code[..*at].lines().last().unwrap_or_default().trim_start();
        line.starts_with("pub") && code[..*at].ends_with(' ')
    };
    for at in places(code, "use ").into_iter().filter(is_public) {
        let statement = code[at..].split_once(';').map_or(&code[at..], |(statement, _)| statement);
        let mut named = paths(statement, module);
        for name in declared(code) {
            let places = places(statement, &format!("{name}::"));
            named.extend(places.into_iter().flat_map(|at| tails(module, &statement[at..])));
        }
        for path in named {
            if let Some((_, item)) = path.rsplit_once("::") {
                exports.insert(item.to_owned(), path);
            }
        }
        rest.replace_range(at..at + statement.len(), &" ".repeat(statement.len()));
    }
    (rest, exports)
}

/// Returns where a word stands that is not the end of another one, or of a path.
fn places(code: &str, word: &str) -> Vec<usize> {
    let is_whole = |at: &usize| !code[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
    code.match_indices(word).map(|(at, _)| at).filter(is_whole).collect()
}

fn tails(base: &str, code: &str) -> Vec<String> {
    let mut tails = Vec::new();
    tails_of(code, &mut tails);
    let whole = |tail: String| if base.is_empty() { tail } else { format!("{base}::{tail}") };
    tails.into_iter().map(whole).collect()
}

/// Collects the paths that a piece of code begins with: one, or those in braces.
fn tails_of(code: &str, found: &mut Vec<String>) {
    let end = code.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(code.len());
    let (path, rest) = code.split_at(end);
    let Some(group) = rest.strip_prefix('{').filter(|_| path.is_empty() || path.ends_with("::")) else {
        return found.push(path.trim_end_matches("::").to_owned());
    };
    let mut depth = 1_usize;
    let mut start = 0;
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 || depth == 1 && c == ',' {
            let mut tails = Vec::new();
            tails_of(group[start..at].trim(), &mut tails);
            found.extend(tails.into_iter().map(|tail| format!("{path}{tail}")));
            start = at + 1;
        }
        if depth == 0 {
            return;
        }
    }
}

/// Prints the structure of each crate.
pub fn report(sources: &[Source]) {
    println!(
        "{:<10} {:>6} {:>7}  largest circles; types with impl blocks in most files",
        "crate", "files", "lines"
    );
    for krate in Crate::all(sources) {
        let circles: Vec<String> =
            krate.circles().iter().take(3).map(|circle| circle.len().to_string()).collect();
        let spread: Vec<String> =
            krate.spread().iter().take(3).map(|(name, count)| format!("{name} {count}")).collect();
        let circles = if circles.is_empty() { "none".to_owned() } else { circles.join(", ") };
        println!(
            "{:<10} {:>6} {:>7}  {circles}; {}",
            krate.name,
            krate.files.len(),
            krate.lines(),
            spread.join(", ")
        );
    }
}

pub fn check(sources: &[Source]) -> Vec<Problem> {
    let mut found = Vec::new();
    for krate in Crate::all(sources) {
        for (name, count) in krate.spread().into_iter().filter(|(_, count)| *count > MOST_SPREAD) {
            let what = format!("impl blocks of {name} in {count} files: at most {MOST_SPREAD}");
            found.push(Problem::new("structure", &format!("crates/{}", krate.name), 1, what));
        }
        if let Some(layers) = LAYERS.iter().find(|layers| layers.name == krate.name) {
            check_layers(&krate, layers, &mut found);
        }
    }
    found
}

fn check_layers(krate: &Crate, layers: &Layers, found: &mut Vec<Problem>) {
    for circle in krate.circles().iter().filter(|circle| circle.len() > layers.most_in_circle) {
        let what = format!("{} files import each other in a circle: {}", circle.len(), circle.join(", "));
        found.push(Problem::new("structure", &format!("crates/{}", krate.name), 1, what));
    }
    let layer_of = |module: &str| {
        let folder = module.split("::").next().unwrap_or_default();
        layers.layers.iter().position(|layer| layer.contains(&folder))
    };
    for (module, File { source, .. }) in &krate.files {
        if module == "lib" || module.starts_with("test_") {
            continue;
        }
        let Some(own) = layer_of(module) else {
            let what = "a module that no layer has (xtask/src/tidy/structure.rs)";
            found.push(Problem::new("structure", &source.path, 1, what));
            continue;
        };
        for other in krate.imports(module) {
            if layer_of(other).is_some_and(|layer| layer > own) {
                let what = format!("imports {other}, which is in a higher layer");
                found.push(Problem::new("structure", &source.path, 1, what));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn found(sources: &[Source]) -> Vec<String> {
        check(sources).into_iter().map(|problem| format!("{}: {}", problem.path, problem.what)).collect()
    }

    #[test]
    fn paths_in_braces_are_found() {
        let code = "use crate::ops::{lookup, files::{self, open}};\nlet x = super::kind();\nmycrate::a";
        let expected = ["ops::lookup", "ops::files::self", "ops::files::open", "calls::kind"];
        assert_eq!(paths(code, "calls::joins"), expected);
    }

    #[test]
    fn paths_above_and_below_a_module_are_found() {
        let code = "mod ways;\npub mod own;\nuse super::super::store::{Inode, dirs};\nuse ways::{One, two};\nother::ways::x;\nown::f()";
        assert_eq!(paths(code, "ops::files::open"), ["ops::store::Inode", "ops::store::dirs"]);
        assert_eq!(
            children(code, "ops::files"),
            ["ops::files::own::f", "ops::files::ways::One", "ops::files::ways::two"]
        );
    }

    #[test]
    fn re_exported_item_belongs_to_its_own_file() {
        let sources = [
            source("crates/cache/src/lib.rs", "mod cache;\nmod store;\npub use cache::{Cache, Config};\n"),
            source("crates/cache/src/cache.rs", "use crate::store::Store;\n"),
            source(
                "crates/cache/src/store.rs",
                "mod inode;\npub(crate) use inode::Inode;\nuse inode::Count;\n",
            ),
            source("crates/cache/src/store/inode.rs", "use crate::Cache;\n"),
            source("crates/cache/src/open.rs", "use crate::store::{self, Inode};\n"),
        ];
        let expected = ["crates/cache/src/store/inode.rs: imports cache, which is in a higher layer"];
        assert_eq!(found(&sources), expected);
        let crates = Crate::all(&sources);
        assert_eq!(crates[0].imports("open"), BTreeSet::from(["store", "store::inode"]));
        assert_eq!(crates[0].imports("store"), BTreeSet::from(["store::inode"]));
        assert_eq!(crates[0].circles(), [["cache", "store", "store::inode"]]);
    }

    #[test]
    fn owner_may_not_import_a_higher_layer() {
        let sources = [
            source("crates/cache/src/store.rs", "mod inode;\n"),
            source("crates/cache/src/store/inode.rs", "use crate::state::State;\n"),
            source("crates/cache/src/state.rs", "use crate::store::Store;\n"),
            source("crates/cache/src/strange.rs", ""),
        ];
        let expected = [
            "crates/cache/src/store/inode.rs: imports state, which is in a higher layer",
            "crates/cache/src/strange.rs: a module that no layer has (xtask/src/tidy/structure.rs)",
        ];
        assert_eq!(found(&sources), expected);
    }

    #[test]
    fn large_circle_is_refused_and_tests_do_not_count() {
        let names = ["a", "b", "c", "d", "e", "f"];
        let module = |at: usize, test: &str| {
            let next = names[(at + 1) % names.len()];
            let text = format!("{test}use crate::ops::{next};\n");
            source(&format!("crates/cache/src/ops/{}.rs", names[at]), &text)
        };
        let circle: Vec<Source> = (0..6).map(|at| module(at, "")).collect();
        let expected = "crates/cache: 6 files import each other in a circle: ops::a, ops::b, ops::c, ops::d, ops::e, ops::f";
        assert_eq!(found(&circle), [expected]);
        let open: Vec<Source> =
            (0..6).map(|at| module(at, if at == 0 { "#[cfg(test)]\n" } else { "" })).collect();
        assert_eq!(found(&open), Vec::<String>::new());
    }

    #[test]
    fn type_may_not_be_spread_over_many_files() {
        let text = "impl State {\n}\nimpl Display for Other {\n}\nimpl<'a> Third<'a> {\n}\n";
        let files = |count: usize| -> Vec<Source> {
            (0..count).map(|at| source(&format!("crates/cache/src/ops/m{at}.rs"), text)).collect()
        };
        assert_eq!(found(&files(6)), Vec::<String>::new());
        let expected = ["State", "Third"]
            .map(|name| format!("crates/cache: impl blocks of {name} in 7 files: at most 6"));
        assert_eq!(found(&files(7)), expected);
    }
}
