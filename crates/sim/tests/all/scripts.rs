//! Every script of `testdata` must produce its recorded text. `UPDATE_SCRIPTS=1` records the present text instead, to
//! be reviewed as a difference.

use std::path::Path;

#[test]
fn every_script_reproduces_its_recorded_text() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 5, "the scripts are there");
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        let happens = nigh_sim::script::run(&text);
        if std::env::var_os("UPDATE_SCRIPTS").is_some() {
            std::fs::write(&path, &happens).unwrap();
        } else {
            assert_eq!(happens, text, "{}", path.display());
        }
    }
}
