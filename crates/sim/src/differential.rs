//! Differential test: one client beside a reference tree that executes the requests directly. Every reply of the cache
//! must equal the tree's, and a repeated request must not reach the remote again.

pub mod outcome;
pub mod reference;
mod requests;

use crate::random::Dice;
use crate::world::World;
use nigh_cache::{Config, Fh, NotifyLevel, Op, OpReply};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{Cookie, Errno, LeaseScope, Name, Span, Term};
use outcome::Outcome;
use reference::ReferenceTree;
use requests::RandomRequests;
use std::collections::BTreeMap;

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub steps: u32,
}

/// A file that the kernel holds open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenFile {
    pub ino: u64,
    pub fh: Fh,
    pub write: bool,
}

pub(crate) struct DifferentialTest {
    pub world: World,
    pub reference: ReferenceTree,
    pub dice: Dice,
    pub files: Vec<OpenFile>,
    /// The kernel's lookup count of each inode.
    nlookup: BTreeMap<u64, u64>,
}

/// Runs one sequence of requests.
///
/// # Errors
/// The first reply that differs, with the requests before it.
pub fn run(plan: Plan) -> Result<(), String> {
    let mut mirror = DifferentialTest::new(plan.seed);
    for step in 1..=plan.steps {
        mirror.step().and_then(|()| mirror.world.check_kernels()).map_err(|lie| {
            format!("seed {} step {step}: {lie}\n{}", plan.seed, mirror.world.trace.join("\n"))
        })?;
        let keep = mirror.world.trace.len().saturating_sub(200);
        mirror.world.trace.drain(..keep);
    }
    mirror.end().map_err(|lie| format!("seed {}: {lie}\n{}", plan.seed, mirror.world.trace.join("\n")))
}

impl DifferentialTest {
    fn new(seed: u64) -> DifferentialTest {
        let mut dice = Dice::new(seed);
        let config = ModelFsConfig {
            term: if dice.below(2) == 0 { Term::Session } else { Term::Limited(Span::from_secs(5)) },
            recallable: dice.below(4) > 0,
            chunk_entries: 1 + u32::try_from(dice.below(4)).unwrap_or(0),
            by_hint_only: dice.below(2) == 0,
            ..ModelFsConfig::default()
        };
        let level = [NotifyLevel::All, NotifyLevel::NoEpoch, NotifyLevel::None]
            [usize::try_from(dice.below(3)).unwrap_or(0)];
        let mut world = World::new(config.clone());
        world.verbose = true;
        world.threads = 4;
        let kernel_inodes_most = 16 + dice.below(3) * 1_000;
        world.connect_with(Config { level, prunes: true, kernel_inodes_most, ..Config::default() });
        DifferentialTest {
            world,
            reference: ReferenceTree::new(config),
            dice,
            files: Vec::new(),
            nlookup: BTreeMap::from([(1, 0)]),
        }
    }

    fn step(&mut self) -> Result<(), String> {
        self.prune();
        match self.dice.below(20) {
            0 => {
                let span = [Span::from_millis(700), Span::from_secs(2), Span::from_secs(6)];
                let at = usize::try_from(self.dice.below(3)).unwrap_or(0);
                self.world.advance(span[at]);
                Ok(())
            }
            1 => self.recall(),
            2 => {
                self.forget_files();
                Ok(())
            }
            3 => self.expire_session(),
            _ => {
                self.world.advance(Span::from_millis(1));
                self.act()
            }
        }
    }

    /// Executes one request on both sides; returns the cache's reply if both replies agree.
    pub fn execute_both(&mut self, op: Op) -> Result<OpReply, String> {
        let (want, handle) = self.reference.execute(self.world.now, &op);
        let answer = self.world.request(0, op.clone());
        self.world.replies.clear();
        let said = Outcome::from_reply(&answer);
        let unlike = said != want && !matches!(op, Op::LookupParent { .. } | Op::OpenDir { .. });
        if unlike {
            return Err(format!("{op:?} is answered {said:?}, the tree says {want:?}"));
        }
        self.count(&answer);
        let opened = match &answer {
            OpReply::Created(node, opened) => Some((node.id.ino, opened.fh)),
            OpReply::Opened(opened) => match op {
                Op::Open { ino, .. } => Some((ino, opened.fh)),
                _ => None,
            },
            _ => None,
        };
        if let (Some((ino, fh)), Some(handle)) = (opened, handle) {
            let write = match op {
                Op::Open { access, .. } | Op::Create { access, .. } => access.write,
                _ => true,
            };
            self.reference.opened(fh, handle);
            self.files.push(OpenFile { ino, fh, write });
        }
        Ok(answer)
    }

    /// Executes a request twice; the second time must not reach the remote.
    pub fn execute_both_cached(&mut self, op: Op) -> Result<OpReply, String> {
        let first = self.execute_both(op.clone())?;
        let before = self.world.clients[0].control.requests();
        let second = self.execute_both(op.clone())?;
        let kept = match &first {
            OpReply::Failed(errno) => *errno == Errno::NODATA,
            // An xattr larger than a page is fetched each time.
            OpReply::Value(value) => value.len() <= 4_096,
            OpReply::Size(size) => *size <= 4_096,
            _ => true,
        };
        if self.world.clients[0].control.requests() > before && kept {
            return Err(format!("{op:?} is asked of the remote again"));
        }
        Ok(second)
    }

    fn count(&mut self, answer: &OpReply) {
        let mut told = Vec::new();
        match answer {
            OpReply::Node(node) | OpReply::Created(node, _) => told.push(node.id.ino),
            OpReply::Page(page) => told.extend(page.entries.iter().filter_map(|e| Some(e.node?.id.ino))),
            _ => {}
        }
        for ino in told {
            *self.nlookup.entry(ino).or_default() += 1;
        }
    }

    /// Lists a directory, whole and in pages of a few entries.
    pub fn list(&mut self, dir: u64) -> Result<(), String> {
        let OpReply::Opened(opened) = self.execute_both(Op::OpenDir { ino: dir })? else {
            return Err(format!("directory {dir} cannot be opened"));
        };
        let (fh, plus) = (opened.fh, self.dice.below(2) == 0);
        let whole = Op::ReadDir { ino: dir, fh, offset: Cookie(0), size: 1 << 16, plus };
        let OpReply::Page(whole) = self.execute_both_cached(whole)? else {
            return Err(format!("directory {dir} cannot be read"));
        };
        let (mut offset, mut names) = (Cookie(0), Vec::new());
        loop {
            let op = Op::ReadDir { ino: dir, fh, offset, size: 320, plus };
            let answer = self.world.request(0, op);
            self.count(&answer);
            let OpReply::Page(page) = answer else { return Err(format!("{dir} ends with {answer:?}")) };
            names.extend(outcome::names(&page));
            let Some(next) = outcome::next_cookie(&page).filter(|next| *next > offset) else { break };
            offset = next;
        }
        self.execute_both(Op::ReleaseDir { fh })?;
        let all = outcome::names(&whole);
        if names != all { Err(format!("{dir} in pages is {names:?}, whole it is {all:?}")) } else { Ok(()) }
    }

    pub fn close(&mut self, at: usize) -> Result<(), String> {
        let file = self.files.swap_remove(at);
        self.execute_both(Op::Flush { ino: file.ino, owner: 0 })?;
        let answer = self.world.request(0, Op::Release { fh: file.fh, flock: None });
        self.reference.closed(file.fh);
        self.forget_dead();
        if answer == OpReply::Done { Ok(()) } else { Err(format!("closing is answered {answer:?}")) }
    }

    /// Makes the kernel forget inodes that have no name and are not open.
    pub fn forget_dead(&mut self) {
        let gone: Vec<u64> = self.nlookup.keys().copied().filter(|ino| !self.reference.has(*ino)).collect();
        gone.into_iter().for_each(|ino| self.forget(ino));
    }

    fn forget(&mut self, ino: u64) {
        if let Some(count) = self.nlookup.remove(&ino) {
            self.world.clients[0].cache.handle_forget(ino, count);
            self.world.settle();
        }
    }

    /// Makes the kernel forget every inode that is neither a directory nor open, as under memory pressure.
    fn forget_files(&mut self) {
        self.forget_unused(self.nlookup.keys().copied().collect());
    }

    /// Makes the kernel forget what the cache asked it to prune, as far as it may.
    fn prune(&mut self) {
        let pruned = std::mem::take(&mut self.world.clients[0].pruned);
        self.forget_unused(pruned);
    }

    fn forget_unused(&mut self, inos: Vec<u64>) {
        for ino in inos {
            let attr = self.reference.tree.attr(self.reference.id(ino));
            if attr.is_some_and(|attr| !attr.is_dir()) && !self.files.iter().any(|file| file.ino == ino) {
                self.forget(ino);
            }
        }
    }

    /// Recalls a lease; the client must acknowledge.
    fn recall(&mut self) -> Result<(), String> {
        let inos: Vec<u64> = self.nlookup.keys().copied().collect();
        let ino = inos[usize::try_from(self.dice.below(inos.len() as u64)).unwrap_or(0)];
        let covers = [LeaseScope::Directory, LeaseScope::Attributes, LeaseScope::Data];
        let covers = covers[usize::try_from(self.dice.below(3)).unwrap_or(0)];
        let control = self.world.clients[0].control.clone();
        let recall = control.recall(self.reference.id(ino), covers, &[]);
        self.world.settle();
        if control.acknowledged(recall) { Ok(()) } else { Err(format!("{ino} {covers:?} is kept")) }
    }

    /// Expires the client's session, and restores it. If the server forgot the session, a file without a known
    /// name cannot be reopened, so it is closed first.
    fn expire_session(&mut self) -> Result<(), String> {
        let kept = self.dice.below(2) == 0;
        let nameless = |mirror: &DifferentialTest, file: &OpenFile| {
            let attr = mirror.reference.tree.attr(mirror.reference.id(file.ino));
            let known = mirror.world.clients[0].cache.parent_entry_of(file.ino);
            known.is_none() || attr.is_none_or(|attr| attr.nlink == 0)
        };
        while let Some(at) = self.files.iter().position(|file| !kept && nameless(self, file)) {
            self.close(at)?;
        }
        let control = self.world.clients[0].control.clone();
        control.lapse("by chance");
        self.world.settle();
        if !self.files.is_empty() && self.dice.below(4) == 0 {
            self.close(0)?;
        }
        control.restore(kept);
        self.world.settle();
        Ok(())
    }

    /// Closes and forgets everything; then the client must hold nothing at the remote.
    fn end(&mut self) -> Result<(), String> {
        while !self.files.is_empty() {
            self.close(0)?;
        }
        let known: Vec<u64> = self.nlookup.keys().copied().filter(|ino| *ino != 1).collect();
        known.into_iter().rev().for_each(|ino| self.forget(ino));
        let (client, gauges) = (&self.world.clients[0], self.world.clients[0].cache.gauges());
        match (client.control.open_handles(), gauges.open_files, gauges.pending_operations) {
            (0, 0, 0) => Ok(()),
            left => Err(format!("handles, files and operations are left: {left:?}")),
        }
    }

    /// Resolves a path by lookups, as the kernel does; `None` if a component does not exist.
    pub fn resolve(&mut self, path: &[&str]) -> Result<Option<u64>, String> {
        let mut at = 1;
        for part in path {
            let name = name(part);
            let is_dir = self.reference.tree.attr(self.reference.id(at)).is_some_and(|attr| attr.is_dir());
            if !is_dir {
                return Ok(None);
            }
            match self.execute_both_cached(Op::Lookup { dir: at, name })? {
                OpReply::Node(node) => at = node.id.ino,
                _ => return Ok(None),
            }
        }
        Ok(Some(at))
    }
}

pub(crate) fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).expect("a name")
}
