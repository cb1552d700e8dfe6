"""Where pictures come from, what becomes of broken ones; crops and masks are functions of (seed, position)."""

import datasets
import numpy as np
import pytest
import torch

from pretrain.errors import UserError
from tests.vision_mae.pictures import encoded, two_halves, write_folder
from vision_mae.data.module import ImageData, denormalise
from vision_mae.data.source import open_images


def open_data(source, **settings) -> ImageData:
    defaults = {"image_size": 32, "patch_size": 16, "val_fraction": 0.0, "global_batch_size": 4, "micro_batch_size": 2}
    data = ImageData(str(source), **defaults | settings)
    data.prepare_data()
    data.setup("fit")
    return data


def test_class_folders_give_labels(tmp_path):
    rows = open_images(str(write_folder(tmp_path)))
    assert rows.classes == ("cat", "dog")
    assert rows.labels == [0, 0, 0, 1, 1, 1]
    assert rows.read(5)[0].endswith("dog/5.png")


def test_a_folder_without_classes_has_no_labels(tmp_path):
    write_folder(tmp_path, classes=())
    (tmp_path / "notes.txt").write_text("passed over")
    (tmp_path / "._0.png").write_text("as macOS leaves them")
    rows = open_images(str(tmp_path))
    assert len(rows) == 6
    assert rows.labels is None


def parquet(path, features, rows) -> str:
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(path))
    return str(path)


PNG = encoded(two_halves(), "PNG")


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (datasets.Image(), {"bytes": PNG, "path": "a.png"}),
        (datasets.Value("binary"), PNG),
        ({"bytes": datasets.Value("binary"), "path": datasets.Value("string")}, {"bytes": PNG, "path": None}),
    ],
)
@pytest.mark.parametrize(
    ("label_feature", "labels", "classes"),
    [
        (datasets.ClassLabel(names=["x", "y"]), [1, 0], ("x", "y")),
        (datasets.Value("int64"), [20, 3], ("3", "20")),
        (datasets.Value("string"), ["b", "a"], ("a", "b")),
    ],
)
def test_parquet_with_an_image_column(tmp_path, feature, value, label_feature, labels, classes):
    features = datasets.Features({"picture": feature, "kind": label_feature})
    file = parquet(tmp_path / "a.parquet", features, [{"picture": value, "kind": label} for label in labels])
    data = open_data(file, image_field="picture", label_field="kind", cache_dir=str(tmp_path / "cache"))
    assert data.classes == classes
    named = isinstance(label_feature, datasets.ClassLabel)  # its labels are numbers of names
    expected = [classes[label] if named else str(label) for label in labels]
    assert [classes[data.train_dataset[i]["label"]] for i in range(2)] == expected
    pixels = denormalise(data.train_dataset[0]["images"], data.views)
    assert pixels[:, 16, 2].tolist() == pytest.approx([1, 0, 0], abs=0.02)


def test_a_hub_dataset_is_read_by_name(tmp_path, monkeypatch):
    table = datasets.Dataset.from_dict(
        {"image": [{"bytes": PNG, "path": None}] * 3, "label": [0, 1, 0]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["p", "q"])}),
    )
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((args, options)) or table)
    rows = open_images("someone/pictures:small:validation")
    assert asked == [(("someone/pictures", "small"), {"split": "validation"})]
    assert rows.labels == [0, 1, 0]
    assert rows.read(1) == ("someone/pictures:small:validation, row 2", PNG, 1)


def test_labels_of_two_sources_are_matched_by_name(tmp_path):
    train = write_folder(tmp_path / "train", classes=("cat", "cow", "dog"))
    val = write_folder(tmp_path / "val", classes=("dog", "cat"))
    data = open_data(train, val_source=str(val))
    assert [data.val_dataset[i]["label"] for i in (0, 5)] == [0, 2]
    with pytest.raises(UserError, match="has the class 'horse', which the training data has not"):
        open_data(train, val_source=str(write_folder(tmp_path / "other", classes=("horse",))))


def test_pictures_are_held_out_for_validation(tmp_path):
    data = open_data(write_folder(tmp_path, n_images=10), val_fraction=0.2)
    train, val = ({rows.read(i)[0] for i in range(len(rows))} for rows in (data.train_rows, data.val_rows))
    assert (len(train), len(val), train & val) == (8, 2, set())


def test_the_vendored_pictures_are_there():
    data = open_data("demo:train", val_source="demo:val")
    assert (len(data.train_dataset), len(data.val_dataset), len(data.classes)) == (1619, 287, 9)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "holds no pictures .0 other files.: it has to hold pictures"),
        (lambda folder: (folder / "a.txt").write_text("x"), "holds no pictures .1 other files."),
        (lambda folder: (folder / "a.parquet").write_text("x"), "cannot be read"),
        (lambda folder: ((folder / "a.parquet").touch(), (folder / "a.png").touch()), "both pictures and .parquet"),
    ],
)
def test_a_folder_that_holds_nothing_to_train_on(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(UserError, match=message):
        open_images(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("source", "message"), [("/no/such/folder", "no such file"), ("", "source is empty"), ("*.gone", "no pictures")]
)
def test_a_source_that_is_not_there(source, message):
    with pytest.raises(UserError, match=message):
        open_images(source)


def test_a_column_that_is_not_there(tmp_path):
    file = parquet(tmp_path / "a.parquet", None, [{"text": "x"}])
    with pytest.raises(UserError, match=r"no column 'image' .columns: text.: set data.image_field"):
        open_images(file, cache_dir=tmp_path / "cache")
    with pytest.raises(UserError, match="has no column"):
        open_images(file, "label", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("content", [PNG[: len(PNG) // 2], b"just text", b""])
def test_a_broken_picture_ends_the_run_with_its_name(tmp_path, content):
    write_folder(tmp_path)
    (tmp_path / "cat" / "broken.jpg").write_bytes(content)
    with pytest.raises(UserError, match=r"cat/broken.jpg: .*1 broken pictures, and data.max_bad allows 0"):
        open_data(tmp_path)


def test_a_small_picture_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="smaller than a patch of 16 x 16"):
        open_data(write_folder(tmp_path, side=9))


def test_up_to_max_bad_broken_pictures_are_left_out(tmp_path, capsys):
    write_folder(tmp_path)
    (tmp_path / "cat" / "0.png").write_text("broken")
    data = open_data(tmp_path, max_bad=1)
    assert capsys.readouterr().err.count("left out") == 1
    # In evaluation it is absent, in training the next picture stands in for it.
    absent = data.train_dataset[0]
    assert not absent["present"]
    assert "cat/0.png" in absent["problem"]
    stand_in = data.train_dataset.draw(0, position=5)
    assert stand_in["present"]
    assert torch.equal(stand_in["images"], data.train_dataset.draw(1, position=5)["images"])
    (tmp_path / "dog" / "5.png").write_text("broken")
    with pytest.raises(UserError, match=r"2 broken pictures, and data\.max_bad allows 1"):
        open_data(tmp_path, max_bad=1)


def test_training_samples_are_a_function_of_seed_and_position(tmp_path):
    folder = write_folder(tmp_path)
    data, other_seed = open_data(folder, seed=3), open_data(folder, seed=4)
    state = torch.get_rng_state()
    first = data.train_dataset.draw(2, position=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    again = open_data(folder, seed=3).train_dataset.draw(2, position=2)
    for name in ("images", "noise"):
        assert torch.equal(first[name], again[name])
        # Another epoch, another picture, another seed.
        assert not torch.equal(first[name], data.train_dataset.draw(2, position=2 + 6)[name])
        assert not torch.equal(first[name], data.train_dataset.draw(3, position=3)[name])
        assert not torch.equal(first[name], other_seed.train_dataset.draw(2, position=2)[name])


def test_validation_masks_are_fixed_and_differ_between_pictures(tmp_path):
    folder = write_folder(tmp_path)
    first, second = (open_data(folder, seed=seed).train_dataset for seed in (0, 1))
    assert torch.equal(first[0]["noise"], second[0]["noise"])
    assert not torch.equal(first[0]["noise"], first[1]["noise"])


def test_an_evaluation_view_is_the_middle_of_the_picture(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir()
    two_halves(64, 32).save(folder / "a.png")
    data = open_data(folder, val_crop_ratio=1.0)
    sample = data.train_dataset[0]
    assert sample["images"].shape == (3, 32, 32)
    pixels = denormalise(sample["images"], data.views)
    expected = np.asarray(two_halves(64, 32).crop((16, 0, 48, 32)), dtype=np.float32).transpose(2, 0, 1) / 255
    torch.testing.assert_close(pixels, torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_grey_pictures(tmp_path):
    data = open_data(write_folder(tmp_path), in_channels=1, patch_size=8)
    assert data.train_dataset.draw(0, 0)["images"].shape == (1, 32, 32)
    assert data.train_dataset[0]["noise"].shape == (16,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_scale": (0.5, 0.2)}, "two ascending numbers"),
        ({"val_crop_ratio": 0.0}, "val_crop_ratio"),
        ({"val_crop_ratio": 1e-300}, "val_crop_ratio"),
        ({"mean": [float("nan")] * 3}, "data.mean"),
        ({"std": [float("inf")] * 3}, "data.std"),
        ({"mean": [0.5]}, "data.mean has 1 values for 3 channels"),
        ({"std": [0.5, 0.5, 0.0]}, "every value has to be positive"),
        ({"max_bad": -1}, "max_bad"),
        ({"val_fraction": 1.5}, "val_fraction"),
        ({"rand_augment": 31}, "rand_augment"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        ImageData("demo:val", **settings)
