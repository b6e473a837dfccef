use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn lookup_racing_with_rename_finds_file_or_enoent() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    std::fs::write(paths[0].join("f"), "").unwrap();
    let folder = std::fs::File::open(&paths[0]).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::fs::rename(paths[0].join("f"), paths[1].join("f")).unwrap();
                std::fs::rename(paths[1].join("f"), paths[0].join("f")).unwrap();
            }
        });
        let mut seen = (0, 0);
        let other = (0..100_000).find_map(|_| match open_beneath(&folder, b"f") {
            Ok(_) => {
                seen.0 += 1;
                None
            }
            Err(Fault(Errno::NOENT)) => {
                seen.1 += 1;
                None
            }
            Err(other) => Some(other),
        });
        over.store(true, Ordering::Relaxed);
        assert_eq!(other, None, "{seen:?}");
        assert!(seen.0 > 0 && seen.1 > 0, "{seen:?}");
    });
}
